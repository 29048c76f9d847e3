"""What the two workers do: calls in blocks, while they are watched in one way or another."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import time
from typing import NamedTuple

from torchweft import observe, rpc
from torchweft.observe.group import Group
from torchweft.observe.tracing.recorder import RECORDER
from torchweft.rpc.node import current_node

_TRACE = 1
_LIMIT = 200_000
_WARM_UP = 200
OFF, COUNTERS, TRACE, BOTH, SPANS = "off", "counters", "trace", "both", "spans"
HAS_SPANS = all(map(importlib.util.find_spec, ("opentelemetry", "opentelemetry.sdk")))
MODES = (OFF, COUNTERS, TRACE, BOTH, *((SPANS,) if HAS_SPANS else ()))


class Block(NamedTuple):
    """A block of calls.

    Attributes:
        caller_s: Processor time of the caller for one call, all threads.
        callee_s: That of the callee.
        call_s: Wall-clock time of one call.
    """

    caller_s: float
    callee_s: float
    call_s: float

    @property
    def both_s(self) -> float:
        """Processor time of both."""
        return self.caller_s + self.callee_s


def pin(core: int) -> None:
    """Runs this process on one core."""
    os.sched_setaffinity(0, {core})


def echo(value: object) -> object:
    """Returns its argument."""
    return value


def processor_time_s() -> float:
    """Returns the processor time of this process."""
    return time.process_time()


@functools.cache
def spans() -> observe.spans:
    """Returns spans of an SDK without an exporter."""
    from opentelemetry.sdk.trace import TracerProvider

    return observe.spans(TracerProvider(shutdown_on_exit=False))


def watch(mode: str) -> None:
    """Has this worker watched in one way from now on."""
    node = current_node()
    RECORDER.get().forget(_TRACE, node.agent.me.id)
    if HAS_SPANS:
        spans().stop()
        if mode == SPANS:
            spans().start()
    if mode in (COUNTERS, BOTH):
        node.reporter.counting.extend(3600.0)
    else:
        node.reporter.counting.tick(math.inf)
    if mode in (TRACE, BOTH):
        RECORDER.get().begin(_TRACE, node.agent.me.id, _LIMIT, profiles=False)


def measure(callee: str, mode: str, calls: int) -> Block:
    """Makes a block of calls; both workers are watched in a way."""
    for name in (callee, rpc.get_worker_info().name):
        rpc.rpc_sync(name, watch, args=(mode,))
    for _ in range(_WARM_UP):  # The interpreter specialises its code for the types in use.
        rpc.rpc_sync(callee, echo, args=(None,))
    there_s = rpc.rpc_sync(callee, processor_time_s)
    here_s, begin_s = time.process_time(), time.perf_counter()
    for _ in range(calls):
        rpc.rpc_sync(callee, echo, args=(None,))
    taken_s, here_s = time.perf_counter() - begin_s, time.process_time() - here_s
    there_s = rpc.rpc_sync(callee, processor_time_s) - there_s
    return Block(here_s / calls, there_s / calls, taken_s / calls)


def own(count: int) -> list[bytes]:
    """Returns values for references, so that a report has something to tell."""
    return [os.urandom(8) for _ in range(count)]


def report_s(group: Group, callee: str, count: int) -> float:
    """Returns the processor time of the callee for one report."""
    group.ask(10.0)
    there_s = rpc.rpc_sync(callee, processor_time_s)
    for _ in range(count):
        group.ask(10.0)
    return (rpc.rpc_sync(callee, processor_time_s) - there_s) / count
