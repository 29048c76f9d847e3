"""Asynchronous generators as streams, and streams that coroutines iterate over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor

from tests.contract.processes import generator_functions as functions
from tests.contract.processes.functions import LIMIT_S, wait_until
from torchweft import autograd, rpc
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster

pytestmark = [pytest.mark.keeps("threads", "descriptors"), pytest.mark.usefixtures("group")]

_variable: ContextVar[int] = ContextVar("variable", default=0)
weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _forgotten(group: Cluster) -> None:
    rpc.rpc_sync("worker0", functions.forget)


def await_seen(what: object) -> None:
    wait_until(
        lambda: what in rpc.rpc_sync("worker0", functions.seen),
        lambda: f"{what!r} is not in {rpc.rpc_sync('worker0', functions.seen)}",
    )


async def count_to(end: int) -> AsyncIterator[int]:
    """Yields numbers, and notes each step and the end."""
    try:
        for number in range(end):
            functions.events.append(number)
            await asyncio.sleep(0)
            yield number
    finally:
        await asyncio.sleep(0)
        functions.events.append("closed")


async def fail_after(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number
    raise LookupError("no more")


async def never() -> AsyncIterator[int]:
    yield 0
    try:
        functions.events.append("computes")
        await asyncio.get_running_loop().create_future()
    finally:
        functions.events.append("cancelled")


async def lasting(count: int) -> AsyncIterator[tuple[bool, int]]:
    with torch.no_grad():
        for number in range(count):
            _variable.set(_variable.get() + number)
            await asyncio.sleep(0)
            yield torch.is_grad_enabled(), _variable.get()


async def scaled(values: list[Tensor]) -> AsyncIterator[Tensor]:
    for value in values:
        await asyncio.sleep(0)
        yield value * weight


async def who_asks() -> AsyncIterator[str]:
    yield rpc.caller().name
    yield rpc.caller().name


class Counter:
    """An actor whose methods are asynchronous."""

    def __init__(self) -> None:
        self.count = 0

    async def add(self) -> int:
        self.count += 1
        return self.count

    async def values(self, end: int) -> AsyncIterator[int]:
        while self.count < end:
            yield await self.add()


def test_values_come_in_order_and_end() -> None:
    assert list(rpc.stream("worker0", count_to, (20,))) == list(range(20))
    assert list(rpc.stream("worker0", count_to, (0,))) == []
    assert list(rpc.stream("driver", count_to, (5,), ahead=1)) == list(range(5))
    assert list(rpc.stream("worker0", functions.asynchronous)) == [1]
    counter = rpc.remote("worker1", Counter)
    assert list(rpc.stream(counter, Counter.values, (4,))) == [1, 2, 3, 4]
    assert list(rpc.stream("worker0", who_asks)) == ["driver"] * 2


def test_it_is_no_further_ahead_than_it_may_be_and_is_closed() -> None:
    numbers = rpc.stream("worker0", count_to, (100,), ahead=3)
    await_seen(2)
    assert next(numbers) == 0
    await_seen(3)
    assert rpc.rpc_sync("worker0", functions.seen) == [0, 1, 2, 3]
    numbers.close()
    await_seen("closed")
    assert list(numbers) == []


def test_one_that_waits_is_cancelled_when_its_stream_is_closed() -> None:
    with rpc.stream("worker0", never) as numbers:
        assert next(numbers) == 0
        await_seen("computes")
    await_seen("cancelled")


def test_an_error_comes_at_its_place_and_ends_the_stream() -> None:
    numbers = rpc.stream("worker0", fail_after, (3,))
    assert [next(numbers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="no more"):
        next(numbers)
    assert list(numbers) == []


def test_modes_and_variables_of_a_generator_last() -> None:
    found = list(rpc.stream("worker0", lasting, (4,)))
    assert found == [(False, 0), (False, 1), (False, 3), (False, 6)]
    assert list(rpc.stream("worker0", lasting, (1,))) == [(False, 0)]


def test_gradients_flow_through_the_values() -> None:
    leaves = [torch.full((2,), float(n), dtype=torch.float64, requires_grad=True) for n in (1, 2)]
    with autograd.context() as context_id:
        values = list(rpc.stream("worker0", scaled, (leaves,)))
        autograd.backward(context_id, [sum(values).square().sum()])  # type: ignore[union-attr]
        found = autograd.get_gradients(context_id)
        expected = torch.tensor([2.0, 3.0], dtype=torch.float64) ** 2 * 6
        for leaf in leaves:
            torch.testing.assert_close(found[leaf], expected, rtol=0, atol=1e-12)


async def take(kind: str) -> list[int]:
    generator = count_to if kind == "async" else functions.count_to
    found = []
    async for number in rpc.stream("worker0", generator, (6,), ahead=2):
        found.append(number)
        await asyncio.sleep(0)
    return found


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize("worker", ["driver", "worker0", "worker1"])
def test_a_coroutine_iterates_over_a_stream(worker: str, kind: str) -> None:
    assert rpc.rpc_sync(worker, take, args=(kind,), timeout=LIMIT_S) == list(range(6))
    if worker == "driver":
        assert asyncio.run(take(kind)) == list(range(6))


def test_others_go_on_while_a_coroutine_waits_for_a_value() -> None:
    async def main() -> list[int]:
        found = []
        held = rpc.stream("worker0", functions.wait_before, (7,), ahead=1)
        async for number in held:
            found.append(number)
            if number == 7:
                go_on = asyncio.get_running_loop().call_later(
                    0.02, rpc.rpc_async, "worker0", functions.go_on
                )
                assert not go_on.cancelled()
        return found

    assert asyncio.run(main()) == [7, 8]


def test_the_limit_of_a_stream_holds_and_a_cancelled_wait_keeps_it() -> None:
    async def main() -> list[int]:
        numbers = rpc.stream("worker0", functions.wait_before, (7,), timeout=0.05)
        found = [await anext(numbers)]
        with pytest.raises(CallTimeout, match="of wait_before on worker 'worker0' had no value"):
            await anext(numbers)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(numbers), 0.01)
        await rpc.rpc_async("worker0", functions.go_on)
        for _ in range(400):
            try:
                return [*found, await anext(numbers)]
            except CallTimeout:
                pass
        return found

    assert asyncio.run(main()) == [7, 8]


def test_a_coroutine_takes_values_of_several_streams_as_they_come() -> None:
    async def main() -> tuple[list[int], list[int]]:
        held = rpc.stream("worker0", functions.wait_before, (100,), ahead=2)
        free = rpc.stream("worker1", count_to, (6,), ahead=2)
        taken, late = [], []
        with rpc.merged([held, free]) as merged:
            async for stream, value in merged:
                (late if stream is held else taken).append(value)
                if len(taken) == 6 and len(late) == 1:
                    await rpc.rpc_async("worker0", functions.go_on)
        return taken, late

    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)) == (list(range(6)), [100, 101])
