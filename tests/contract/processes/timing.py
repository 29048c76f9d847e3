"""Functions that workers run in the tests of deadlines and cancellation, and their notes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from torch.futures import Future

from tests.contract.processes.functions import pass_gate, wait_until
from torchweft import rpc

_noted: defaultdict[str, list[Any]] = defaultdict(list)
LIMIT_S = 15.0


def note(name: str, value: Any = None) -> None:
    _noted[name].append(value)


def noted(name: str) -> list[Any]:
    return _noted[name]


# Time


def time_left() -> float:
    return rpc.remaining_time()


def time_left_at(to: str, timeout: float) -> float:
    return rpc.rpc_sync(to, time_left, timeout=timeout)


async def time_left_soon() -> list[float]:
    """Returns the remaining time in this coroutine and in two tasks that it starts."""

    async def ask() -> float:
        await asyncio.sleep(0)
        return rpc.remaining_time()

    others = await asyncio.gather(ask(), ask())
    return [rpc.remaining_time(), *others]


@rpc.async_execution
def time_left_afterwards(to: str) -> Future[float]:
    return rpc.rpc_async(to, time_left).then(lambda done: done.wait() and rpc.remaining_time())


@rpc.async_execution
def time_left_of_a_nested_call(to: str) -> Future[float]:
    return rpc.rpc_async(to, time_left, timeout=0)


class Value:
    """A value whose method returns the remaining time."""

    def time_left(self) -> float:
        return rpc.remaining_time()


def call_detached(to: str) -> float:
    with rpc.detached():
        return rpc.rpc_sync(to, time_left, timeout=0)


def wait_nested(to: str) -> None:
    """Notes how a call ends that has no time limit and is never answered.

    Returns only when the caller has noted its own end: both run out of time at the same moment.
    """
    try:
        rpc.rpc_sync(to, pass_gate, args=("never",), timeout=0)
    except Exception as error:
        note("nested", error)
        note_refused("refused", to)
        wait_until(lambda: noted("the caller's end"), lambda: "the caller still waits")


def note_refused(name: str, to: str) -> None:
    """Notes the errors of calls made now, one in each of the three ways."""
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        try:
            call(to, note, args=("must not run",))  # type: ignore[operator]
        except Exception as error:
            note(name, error)


# Cancellation


def until_cancelled(name: str) -> None:
    """Runs until it is cancelled."""
    note(name, "begins")
    wait_until(rpc.is_cancelled, lambda: "nobody has cancelled it", LIMIT_S)
    note(name, "ends")


def until_nested_is_cancelled(to: str, name: str) -> None:
    try:
        rpc.rpc_sync(to, until_cancelled, args=(name,), timeout=0)
    except Exception as error:
        note(name, error)


async def sleep_until_cancelled(name: str) -> None:
    note(name, "begins")
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        note(name, "cancelled")
        raise


async def await_until_cancelled(to: str, name: str) -> None:
    await rpc.rpc_async(to, sleep_until_cancelled, args=(name,), timeout=0)


@rpc.async_execution
def continue_until_cancelled(to: str, name: str) -> Future[None]:
    call = rpc.rpc_async(to, until_cancelled, args=(name,), timeout=0)

    def note_end(done: Future[None]) -> None:
        note(name, rpc.is_cancelled())
        note_refused(name + " refused", to)
        done.wait()

    return call.then(note_end)


def cleanup_when_cancelled(to: str, name: str) -> None:
    note(name, "begins")
    wait_until(rpc.is_cancelled, lambda: "nobody has cancelled it", LIMIT_S)
    with rpc.detached():
        rpc.rpc_sync(to, note, args=(name, "cleaned up"))
