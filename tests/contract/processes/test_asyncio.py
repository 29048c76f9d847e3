"""Futures of calls in asyncio: each of its ways to wait ends, in any event loop."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.contract.processes import functions
from tests.contract.processes.functions import LIMIT_S
from torchweft import mapreduce, rpc
from torchweft.errors import CallCancelled
from torchweft.launch import Cluster

NUMBERS = [0, 1, 2]
pytestmark = pytest.mark.keeps("threads", "descriptors")


def calls(to: str = "worker0") -> list[rpc.Future[int]]:
    return [rpc.rpc_async(to, functions.soon, args=(each,)) for each in NUMBERS]


async def by_wait() -> list[int]:
    done, pending = await asyncio.wait(calls())
    assert not pending
    return sorted([await each for each in done])


async def by_wait_for_the_first() -> list[int]:
    done, pending = await asyncio.wait(calls(), return_when=asyncio.FIRST_COMPLETED)
    assert done
    while pending:
        more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert more
        done |= more
    return sorted(each.value() for each in done)


async def by_wait_with_a_limit() -> list[int]:
    gate = uuid.uuid4().hex
    held = rpc.rpc_async("worker1", functions.pass_gate, args=(gate, 7))
    done, pending = await asyncio.wait([held], timeout=0.01)
    assert (done, pending) == (set(), {held})
    rpc.rpc_sync("worker1", functions.open_gate, args=(gate,))
    done, pending = await asyncio.wait([held, *calls()])
    assert not pending
    return sorted({await each for each in done} - {7})


async def by_gather() -> list[int]:
    return list(await asyncio.gather(*calls()))


async def by_as_completed() -> list[int]:
    return sorted([await each for each in asyncio.as_completed(calls())])


async def by_wait_for() -> list[int]:
    return [await asyncio.wait_for(each, LIMIT_S) for each in calls()]


async def by_shield() -> list[int]:
    return [await asyncio.shield(each) for each in calls()]


async def by_tasks() -> list[int]:
    async def one(call: Awaitable[int]) -> int:
        return await call

    tasks = [asyncio.ensure_future(one(each)) for each in calls()]
    await asyncio.wait(tasks)
    return [each.result() for each in tasks]


async def by_a_map() -> list[int]:
    maps = [mapreduce.remote_async_call(functions.identity, args=(each,)) for each in NUMBERS]
    done, _ = await asyncio.wait(maps)
    return sorted([(await each)[0] for each in done])


WAYS = (
    by_wait,
    by_wait_for_the_first,
    by_wait_with_a_limit,
    by_gather,
    by_as_completed,
    by_wait_for,
    by_shield,
    by_tasks,
    by_a_map,
)


async def limited(way: Callable[[], Awaitable[list[int]]]) -> list[int]:
    return await asyncio.wait_for(way(), LIMIT_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_in_the_program_s_loop_ends(group: Cluster, way: Any) -> None:
    assert asyncio.run(limited(way)) == NUMBERS


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_in_a_coroutine_of_a_worker_ends(group: Cluster, way: Any) -> None:
    assert rpc.rpc_sync("worker1", limited, args=(way,), timeout=LIMIT_S) == NUMBERS


def test_the_first_error_ends_a_wait(group: Cluster) -> None:
    async def main() -> None:
        held = rpc.rpc_async("worker1", functions.pass_gate, args=("error", 7))
        given_up = rpc.rpc_async("worker1", functions.pass_gate, args=("given up", 7))
        failing = rpc.rpc_async("worker0", functions.fail, args=(KeyError("k"),))
        assert given_up.cancel()
        with pytest.raises(asyncio.InvalidStateError):
            held.exception()
        waiting = asyncio.wait([held, given_up, failing], return_when=asyncio.FIRST_EXCEPTION)
        done, pending = await asyncio.wait_for(waiting, LIMIT_S)
        assert (failing in done, held in pending) == (True, True)
        await asyncio.wait_for(asyncio.wait([given_up]), LIMIT_S)  # A thread of Weft ends it.
        assert (held.cancelled(), given_up.cancelled(), failing.cancelled()) == (False, True, False)
        assert isinstance(given_up.exception(), CallCancelled)
        assert isinstance(failing.exception(), KeyError)
        rpc.rpc_sync("worker1", functions.open_gate, args=("error",))
        assert await held == 7
        assert held.exception() is None

    asyncio.run(main())


def test_a_callback_of_the_program_does_not_need_the_loop(group: Cluster) -> None:
    async def main() -> int:
        called = threading.Event()
        (call, *_) = calls()
        call.add_done_callback(lambda _: called.set())
        assert called.wait(LIMIT_S)  # The loop's thread is blocked here.
        return call.value()

    assert asyncio.run(main()) == 0


def test_a_call_may_end_after_a_loop_that_waited_for_it(
    group: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    call = rpc.rpc_async("worker1", functions.pass_gate, args=("after", 1))

    async def begin() -> None:
        waiting = asyncio.ensure_future(asyncio.wait([call]))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(begin())
    rpc.rpc_sync("worker1", functions.open_gate, args=("after",))
    assert call.wait() == 1
    assert "Event loop is closed" not in capfd.readouterr().err
