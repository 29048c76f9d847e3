"""Has each cluster of a program traced, for tests that run programs as they are.

This folder is put in front of ``PYTHONPATH``. The variable ``TRACED`` names the file of the trace;
what the counters have counted meanwhile is written beside it, as ``TRACED.counts``.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

from torchweft.launch import Cluster

_SERVICE = "torchweft.observe.tracing.recorder."
_LIMIT = 1_000_000
_ANSWERED_S = 30.0

_start, _close = Cluster.start, Cluster.close
_traces: dict[int, tuple[Any, dict[str, Counter[str]]]] = {}


def counted() -> dict[str, int]:
    """Returns the calls of this worker, by direction and function."""
    from torchweft.rpc.node import current_node

    counts: Counter[str] = Counter()
    for each in current_node().reporter.counting.counts():
        if not each.function.startswith((_SERVICE, f"{__name__}.")):
            counts[f"{each.direction} {each.function}"] += each.calls
    return dict(counts)


def count_all() -> dict[str, Counter[str]]:
    from torchweft import rpc

    infos = rpc.get_worker_infos()
    return {info.name: Counter(rpc.rpc_sync(info, counted)) for info in infos}


def open_calls() -> int:
    """Returns how many calls of this worker have no answer yet."""
    from torchweft.engine.worker.current import current

    return len(current().calls)


def await_answers() -> None:
    """Waits for calls of the other workers for which their programs do not wait."""
    from torchweft import rpc

    others = [info for info in rpc.get_worker_infos() if info != rpc.get_worker_info()]
    end_s = time.monotonic() + _ANSWERED_S
    while any(rpc.rpc_sync(info, open_calls) for info in others):
        if time.monotonic() > end_s:
            raise TimeoutError(f"calls had no answer within {_ANSWERED_S} s")
        time.sleep(0.01)


def start(self: Cluster) -> Cluster:
    result = _start(self)
    from torchweft.observe.tracing.session import Trace

    before = count_all()
    trace = Trace(os.environ["TRACED"], limit=_LIMIT)
    trace.__enter__()
    _traces[id(self)] = trace, before
    return result


def close(self: Cluster) -> None:
    trace, before = _traces.pop(id(self), (None, {}))
    if trace is not None:
        await_answers()
        trace.__exit__(None, None, None)
        counts = {name: dict(found - before[name]) for name, found in count_all().items()}
        with open(os.environ["TRACED"] + ".counts", "w") as file:
            json.dump(counts, file)
    _close(self)


if "TRACED" in os.environ:
    Cluster.start, Cluster.close = start, close  # type: ignore[method-assign]
