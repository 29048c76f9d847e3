"""Clients that join an open group, work, and go by every way out.

They are forked from a warm process that is no worker, some at a time, by ``Clients``. What they
work leaves on their server what calls can leave there: graphs, contexts, references, streams,
memory, code, batches. The ways out cut this short at any moment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from torchweft import autograd, rpc
from torchweft.rpc import functions

SERVER = "server"
LIMIT_S = 60.0
INTERRUPTS = 12
"""How often a client is interrupted in its work."""
_LONGEST_PAUSE_S = 0.02
_LEAVE_LIMIT_S = 3.0
_END_LIMIT_S = 15.0
"""How long a client may take to end before it is killed."""
_TELL_S = 0.5
"""How long it may take to write its stacks before that."""
_REPORT = struct.Struct("dd")


# What the server does for them


class Service:
    """An object of the server that clients use together."""

    def __init__(self) -> None:
        self.model = nn.Linear(8, 8)

    @functions.batched(longest_wait=0.001)
    def classify(self, states: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.model(states)
            return result


_service: list[Service] = []


def begin_service() -> None:
    """Makes the object that the clients use, on the server."""
    _service.append(Service())


def service() -> rpc.RRef[Service]:
    """Returns a new reference to the object."""
    return rpc.RRef(_service[0])


def forward(value: Tensor) -> Tensor:
    result: Tensor = _service[0].model(value)
    return result


def double(value: Any) -> Any:
    return value * 2


def use(reference: rpc.RRef[Any]) -> Any:
    """Uses a value of the client."""
    return reference.to_here()


def take_long(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


async def take_turns(value: int) -> int:
    return value


def count_up(end: int) -> Iterator[int]:
    yield from range(end)


# What they work


def work() -> None:
    """Uses the server in every way that may leave something there."""
    kept: list[Any] = [rpc.rpc_sync(SERVER, double, (torch.ones(8),))]
    kept.append(rpc.remote(SERVER, Service))
    kept.append(shared := rpc.rpc_sync(SERVER, service))
    kept.append(shared.rpc_sync().classify(torch.ones(1, 8)))
    kept.append(rpc.rpc_sync(SERVER, use, (rpc.RRef(torch.ones(3)),)))
    kept.append(rpc.rpc_sync(SERVER, double, (torch.ones(1 << 19),)))  # pulled
    kept.append(rpc.rpc_sync(SERVER, lambda value: value + 1, (1,)))
    kept.append(rpc.rpc_sync(SERVER, take_turns, (1,)))
    numbers = rpc.stream(SERVER, count_up, (100,), ahead=2)
    kept += [next(numbers), numbers]
    leaf = torch.ones(2, 8, requires_grad=True)
    kept.append(rpc.rpc_sync(SERVER, forward, (leaf * 2,)))  # keeps its graph there
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(SERVER, forward, (leaf,)).sum()
        autograd.backward(context_id, [loss])
    kept.append(rpc.rpc_async(SERVER, double, (3,)))
    with contextlib.suppress(ZeroDivisionError):
        rpc.rpc_sync(SERVER, divmod, (1, 0))


def _kill_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


# The ways out, each called by a worker of the group


def leave() -> None:
    work()
    rpc.shutdown(timeout=LIMIT_S)


def leave_at_once() -> None:
    work()
    rpc.shutdown(graceful=False)


def end_without_shutdown() -> None:
    work()


def raise_an_error() -> NoReturn:
    work()
    raise ValueError("a client fails")


def exit_in_a_context() -> NoReturn:
    with autograd.context():
        work()
        sys.exit(3)


def be_killed() -> None:
    work()
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_before_any_call() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_in_work() -> None:
    _kill_after(random.random() * 0.05)
    while True:
        work()


def be_killed_in_a_call() -> None:
    _kill_after(0.02)
    rpc.rpc_sync(SERVER, take_long, (0.1,))


def be_killed_in_a_context() -> None:
    with autograd.context():
        kept = rpc.rpc_sync(SERVER, forward, (torch.ones(2, 8, requires_grad=True),))
        os.kill(os.getpid(), signal.SIGKILL)
        del kept


def be_killed_as_it_leaves() -> None:
    work()
    _kill_after(random.random() * 0.005)
    rpc.shutdown(timeout=LIMIT_S)


def be_interrupted() -> None:
    """Is interrupted at any moment of its work, as by Ctrl-C; then leaves."""
    for _ in range(INTERRUPTS):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.random() * _LONGEST_PAUSE_S + 1e-4)
            while True:
                work()
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
    work()
    # An interrupt within the tables of calls or references may leave a call there for ever.
    rpc.shutdown(timeout=_LEAVE_LIMIT_S)


def be_interrupted_in_a_call() -> None:
    """Ends by an interrupt of a call, as a script does at Ctrl-C."""
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    rpc.rpc_sync(SERVER, take_long, (0.1,))


def be_killed_as_it_joins() -> None:
    """Is killed in ``init_rpc``, or soon after."""


WAYS: tuple[Callable[[], None], ...] = (
    leave,
    leave_at_once,
    end_without_shutdown,
    raise_an_error,
    exit_in_a_context,
    be_killed,
    be_killed_before_any_call,
    be_killed_in_work,
    be_killed_in_a_call,
    be_killed_in_a_context,
    be_killed_as_it_leaves,
    be_killed_as_it_joins,
    be_interrupted,
    be_interrupted_in_a_call,
)


class Joined(NamedTuple):
    """How long a client took to join.

    Attributes:
        elapsed_s: By the clock.
        cpu_s: By the clock of its process.
    """

    elapsed_s: float
    cpu_s: float


class Stuck(NamedTuple):
    """A client that did not end.

    Attributes:
        way: The way by which it was to go.
        output: What it has written to standard error; in the end, the stacks of its threads.
    """

    way: str
    output: str


def join(name: str, rank: int, method: str) -> Joined:
    """Makes this process a worker of the open group."""
    options = rpc.RpcBackendOptions(
        init_method=method, init_timeout=LIMIT_S, rpc_timeout=LIMIT_S, num_worker_threads=4
    )
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    return Joined(time.monotonic() - began_s, time.process_time() - began_cpu_s)


def _client(number: int, way: Callable[[], None], method: str, report: int, output: int) -> None:
    """Lives as one client."""
    random.seed(number)
    os.dup2(output, 2)  # Most ways out print a traceback or a warning.

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    if way is be_killed_as_it_joins:
        _kill_after(random.random() * 0.03)
    # Two of three names and ranks come again.
    again = number % 3
    name, rank = (f"client{number}", number) if not again else (f"again{again}", again)
    joined = join(name, 1 + rank, method)
    os.write(report, _REPORT.pack(*joined))
    os.close(report)
    way()


class Clients:
    """Starts clients from a warm process; to be made before this process becomes a worker.

    Args:
        method: The init method of the group.
    """

    def __init__(self, method: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_fork_clients, args=(theirs, self._connection, method)
        )
        self._process.start()
        theirs.close()

    def run(self, numbers: Sequence[int]) -> tuple[list[Joined], list[Stuck]]:
        """Runs some clients at the same time, each by the way of its number; blocks.

        Returns:
            How long those took to join that have joined; and of those that did not end, and were
            killed, the way and the output.
        """
        self._connection.send(numbers)
        joined, stuck = self._connection.recv()
        return [Joined(*each) for each in joined], [Stuck(*each) for each in stuck]

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()
        self._process.close()


def _fork_clients(commands: Connection, ends_of_parent: Connection, method: str) -> None:
    ends_of_parent.close()  # Else this process would not see that its parent has closed it.
    context = multiprocessing.get_context("fork")
    with contextlib.suppress(EOFError):
        while True:
            numbers = commands.recv()
            started = []
            for number in numbers:
                come, report = os.pipe()
                way, output = WAYS[number % len(WAYS)], os.memfd_create("output")
                process = context.Process(
                    target=_client, args=(number, way, method, report, output)
                )
                process.start()
                os.close(report)
                started.append((way, process, come, output))
            reports: list[tuple[float, ...]] = []
            stuck: list[tuple[str, str]] = []
            for way, process, come, output in started:
                process.join(_END_LIMIT_S)
                if process.is_alive():
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGUSR1)  # A worker then writes its stacks.
                    process.join(_TELL_S)
                    process.kill()
                    process.join()
                    stuck.append((way.__name__, os.pread(output, 1 << 20, 0).decode()))
                os.close(output)
                told = os.read(come, _REPORT.size)
                os.close(come)
                if len(told) == _REPORT.size:
                    reports.append(_REPORT.unpack(told))
                process.close()
            commands.send((reports, stuck))
