"""Functions that the workers of these tests run, and queries of their state."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.futures import Future

from torchweft import rpc

LIMIT_S = 20.0
POLL_S = 0.01
WORKER_THREADS = 2
"""So few that calls which wait for one another would exhaust the threads if each held one."""

_kept: dict[str, Any] = {}


def wait_until(
    is_so: Callable[[], bool], message: Callable[[], str], limit_s: float = LIMIT_S
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, message()
        time.sleep(POLL_S)


def stop(pid: int) -> None:
    """Stops a process: it lives, its connections stay, and it answers nothing.

    The signal stops one thread of a process, which stops the others; until then they may answer.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _is_stopped(pid), lambda: f"process {pid} is not stopped")


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        states = [(each / "stat").read_text() for each in tasks]
    except (FileNotFoundError, ProcessLookupError):  # A thread has ended meanwhile.
        return False
    return all(") T" in state for state in states)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keeps a process stopped in a block."""
    try:
        stop(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def options(**others: float) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(
        **{"num_worker_threads": WORKER_THREADS, "rpc_timeout": 20.0, **others}  # type: ignore[arg-type]
    )


def raised_by(wait: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:
        wait()
    return caught.value


# Plain functions


def add(first: Any, second: Any) -> Any:
    return first + second


def identity(value: Any) -> Any:
    return value


def collect(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def name_here() -> str:
    return rpc.get_worker_info().name


def process_id() -> int:
    return os.getpid()


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return 2 * first + second


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_sum = torch.jit.script(_sum)


class Accumulator:
    """A value with methods of every kind."""

    unit: ClassVar[str] = "steps"

    def __init__(self, start: float = 0.0) -> None:
        self.total = start

    @rpc.expose
    def add(self, amount: float) -> float:
        self.total += amount
        return self.total

    @rpc.expose
    def __call__(self, amount: float) -> float:
        return self.add(amount)

    def fail(self) -> None:
        raise LookupError(f"at {self.total}")

    def where(self) -> str:
        return name_here()

    @classmethod
    def unit_of(cls, amount: float) -> str:
        return f"{amount} {cls.unit}"

    @staticmethod
    def double(amount: float) -> float:
        return 2 * amount

    @rpc.async_execution
    def add_from(self, to: str, amount: float) -> Future[float]:
        return rpc.rpc_async(to, identity, args=(amount,)).then(lambda done: self.add(done.wait()))

    @classmethod
    @rpc.async_execution
    def unit_from(cls, to: str) -> Future[str]:
        return rpc.rpc_async(to, add, args=("in ", cls.unit))

    @staticmethod
    @rpc.async_execution
    def double_from(to: str, amount: float) -> Future[float]:
        return rpc.rpc_async(to, Accumulator.double, args=(amount,))

    async def add_soon(self, amount: float) -> float:
        await asyncio.sleep(0)
        return self.add(amount)


# Functions that call others


def call_through(names: list[str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls ``function`` on the last worker of ``names``, by way of all others."""
    if not names:
        return function(*args)
    return rpc.rpc_sync(names[0], call_through, args=(names[1:], function, args))


def bounce(depth: int, names: list[str]) -> int:
    """Calls itself on one worker after the other, ``depth`` calls deep; counts them."""
    if not depth:
        return 0
    deeper: int = rpc.rpc_sync(names[depth % len(names)], bounce, args=(depth - 1, names))
    return deeper + 1


def fan_out(depth: int, names: list[str]) -> int:
    """Calls itself on all workers at once; counts the leaves of the tree."""
    if not depth:
        return 1
    branches = [rpc.rpc_async(name, fan_out, args=(depth - 1, names)) for name in names]
    return sum(torch.futures.wait_all(branches))


def bounce_references(depth: int, names: list[str]) -> int:
    if not depth:
        return 0
    deeper = rpc.remote(names[depth % len(names)], bounce_references, args=(depth - 1, names))
    return deeper.to_here() + 1


def wait_for_then(to: str, value: int) -> int:
    """Blocks in a plain PyTorch future, which does not report that this thread waits."""
    return rpc.rpc_async(to, identity, args=(value,)).then(lambda done: done.wait() + 1).wait()


@rpc.async_execution
def add_by(to: str, first: Any, second: Any) -> Future[Any]:
    return rpc.rpc_async(to, add, args=(first, second))


@rpc.async_execution
def add_in_chain(names: list[str], value: int) -> Future[int]:
    """Adds one on every worker of ``names``; no thread waits for another."""
    if not names:
        done: Future[int] = Future()
        done.set_result(value)
        return done
    return rpc.rpc_async(names[0], add_in_chain, args=(names[1:], value + 1))


@rpc.async_execution
def complete_from_a_thread(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@rpc.async_execution
def fail_in_future(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


@rpc.async_execution
def return_no_future() -> Any:
    return 3


async def soon(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def soon_through(to: str, value: Any) -> Any:
    return await rpc.rpc_async(to, soon, args=(value,))


async def fail_soon(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def meet(barrier: str, parties: int) -> int:
    """Returns when ``parties`` coroutines have arrived, so they must run concurrently."""
    arrived = _kept.setdefault(barrier, [])
    arrived.append(None)
    while len(arrived) < parties:
        await asyncio.sleep(0)
    return len(arrived)


# Errors


class OddError(Exception):
    """Its constructor takes other arguments than it passes on."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail


class WorseError(OddError):
    """Cannot be rebuilt from its ``args``."""

    def __init__(self, first: object, second: object, third: object) -> None:
        super().__init__(3, detail=f"{first}{second}{third}")
        self.parts = (first, second, third)


def fail(error: BaseException) -> None:
    raise error


def fail_oddly() -> None:
    raise OddError(7, detail="seven")


def fail_worse() -> None:
    raise WorseError("a", "b", "c")


def fail_with_cause() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def fail_with_lock() -> None:
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def fail_locally_defined() -> None:
    class HereOnly(ArithmeticError):
        pass

    raise HereOnly("nobody else has my type")


def fail_holding(value: object) -> None:
    """Fails with a traceback that holds the argument."""
    raise ValueError("of a call with a reference")


def exit_here() -> None:
    sys.exit(3)


def interrupt_here() -> None:
    raise KeyboardInterrupt


def make_lock() -> Any:
    return threading.Lock()


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return fail, (ArithmeticError("cannot be rebuilt"),)


# Gates: a call waits until its gate opens, and holds no thread meanwhile.


class _Gate:
    def __init__(self) -> None:
        self.is_open = False
        self.waiting: list[tuple[Future[Any], Any]] = []


_gates: defaultdict[str, _Gate] = defaultdict(_Gate)
_gates_lock = threading.Lock()


_meeting = threading.Barrier(2)


def meet_another() -> None:
    """Returns when two calls of this function run at the same time."""
    _meeting.wait(LIMIT_S)


@rpc.async_execution
def pass_gate(name: str, value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    with _gates_lock:
        gate = _gates[name]
        gate.waiting.append((future, value))
        is_open = gate.is_open
    if is_open:
        open_gate(name)
    return future


def open_gate(name: str) -> None:
    with _gates_lock:
        gate = _gates[name]
        gate.is_open = True
        waiting, gate.waiting = gate.waiting, []
    for future, value in waiting:
        future.set_result(value)


# Values and references


class Tracked:
    """A value whose live instances are counted."""

    alive: ClassVar[weakref.WeakSet[Tracked]] = weakref.WeakSet()

    def __init__(self, content: Any = None) -> None:
        self.content = content
        self.other: Any = None
        Tracked.alive.add(self)

    @rpc.expose
    def get(self) -> Any:
        return self.content

    def set_other(self, other: Any) -> None:
        self.other = other

    def this(self) -> Tracked:
        return self

    def __reduce__(self) -> Any:
        return Tracked, (self.content,)


def count_tracked() -> int:
    gc.collect()
    return len(Tracked.alive)


def make_reference(content: Any = None) -> rpc.RRef[Tracked]:
    return rpc.RRef(Tracked(content))


def fetch_content(reference: rpc.RRef[Tracked]) -> Any:
    return reference.to_here().content


def make_on(to: str, content: Any) -> rpc.RRef[Tracked]:
    return rpc.remote(to, Tracked, args=(content,))


def keep(name: str, value: Any) -> None:
    _kept[name] = value


def give(name: str) -> Any:
    return _kept[name]


def drop(name: str) -> None:
    del _kept[name]
    gc.collect()


def is_confirmed(reference: rpc.RRef[Any]) -> bool:
    return reference.confirmed_by_owner()


# Tensors


def describe_tensor(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, float]:
    return tuple(tensor.shape), str(tensor.dtype), float(tensor.to(torch.float64).sum())


# The end of a group


WRITE_DELAY_S = 0.2
"""Long enough that a shutdown which does not wait ends before it."""


def write_slowly(path: str) -> None:
    time.sleep(WRITE_DELAY_S)
    Path(path).touch()


async def write_soon(path: str) -> None:
    await asyncio.sleep(WRITE_DELAY_S)
    Path(path).touch()


def write_after_calls(path: str) -> None:
    here = name_here()
    for _ in range(5):
        rpc.rpc_sync("driver", call_through, args=([here], time.sleep, (WRITE_DELAY_S / 5,)))
    Path(path).touch()
