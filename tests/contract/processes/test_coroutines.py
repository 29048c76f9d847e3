"""The event loop of a worker: who wakes it, and what is told if it stands still."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.contract.processes.functions import LIMIT_S, wait_until
from tests.contract.processes.listening import heard, listen
from torchweft import rpc
from torchweft.errors import CallRefused

pytestmark = [pytest.mark.keeps("threads", "descriptors"), pytest.mark.usefixtures("group")]


class Signal:
    """A coroutine waits on the loop, for plain methods that run on other threads."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def wait(self) -> str:
        await self.event.wait()
        return "woken"

    async def get(self) -> int:
        return await self.queue.get()

    async def is_awaited(self) -> bool:
        await asyncio.sleep(0)
        return True

    def send(self) -> None:
        self.event.set()

    def put(self, value: int) -> None:
        self.queue.put_nowait(value)


def test_a_plain_method_wakes_what_waits_on_the_loop() -> None:
    for worker in ("worker0", "driver"):
        signal = rpc.remote(worker, Signal)
        waiting = [rpc.on(signal, timeout=LIMIT_S).rpc_async(Signal.wait) for _ in range(3)]
        taking = [rpc.on(signal, timeout=LIMIT_S).rpc_async(Signal.get) for _ in range(3)]
        assert rpc.on(signal).rpc_sync(Signal.is_awaited)  # All others wait by now.
        time.sleep(0.05)  # The loop sleeps.
        signal.rpc_sync().send()
        assert [each.wait() for each in waiting] == ["woken"] * 3
        for number in range(3):
            signal.rpc_sync().put(number)
        assert sorted(each.wait() for each in taking) == [0, 1, 2]


class Asking:
    """Coroutines that block where they should await."""

    async def answer(self) -> int:
        return 5

    def through(self, me: rpc.RRef[Asking]) -> int:
        return rpc.on(me).rpc_sync(Asking.answer)

    def plain(self) -> int:
        return 3

    async def blocks(self, me: rpc.RRef[Asking], way: str) -> int:
        if way == "rpc_sync":
            return rpc.on(me).rpc_sync(Asking.answer)
        if way == "wait":
            return rpc.on(me).rpc_async(Asking.answer).wait()
        if way == "limited wait":
            return rpc.on(me).rpc_async(Asking.answer).wait(LIMIT_S)
        if way == "as_completed":
            (call,) = rpc.as_completed([rpc.on(me).rpc_async(Asking.answer)])
            return call.wait()
        return rpc.on(me).rpc_sync(Asking.through, me)

    async def awaits(self, me: rpc.RRef[Asking]) -> int:
        return await rpc.on(me).rpc_async(Asking.answer)

    async def waits_for_a_plain_one(self, me: rpc.RRef[Asking]) -> int:
        return rpc.on(me).rpc_sync(Asking.plain)


@pytest.mark.parametrize("way", ["rpc_sync", "wait", "limited wait", "as_completed", "through"])
def test_a_coroutine_that_blocks_for_its_own_loop_is_told_to_await(way: str) -> None:
    asking = rpc.remote("worker0", Asking)
    began_s = time.monotonic()
    with pytest.raises(CallRefused, match=r"Asking.answer would never run: Asking.blocks blocks"):
        rpc.on(asking, timeout=LIMIT_S).rpc_sync(Asking.blocks, asking, way)
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert rpc.on(asking).rpc_sync(Asking.awaits, asking) == 5
    assert rpc.on(asking).rpc_sync(Asking.waits_for_a_plain_one, asking) == 3


async def stand_still(limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not heard("event loop") and time.monotonic() < end_s:
        time.sleep(0.01)


def test_a_coroutine_that_blocks_the_loop_is_named() -> None:
    rpc.rpc_sync("worker1", listen, args=(True,))
    try:
        rpc.rpc_sync("worker1", stand_still, args=(LIMIT_S,), timeout=2 * LIMIT_S)
        wait_until(
            lambda: bool(rpc.rpc_sync("worker1", heard, args=("event loop",))),
            lambda: "nothing was logged",
        )
        (text,) = rpc.rpc_sync("worker1", heard, args=("event loop",))
        assert text.startswith("stand_still has blocked the event loop of worker 'worker1' for ")
        assert f"at {__file__}:" in text
    finally:
        rpc.rpc_sync("worker1", listen, args=(False,))
