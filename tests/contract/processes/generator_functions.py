"""Generators and actors that the workers of these tests run."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from torch import Tensor

from torchweft import rpc
from torchweft.rpc import functions

LIMIT_S = 20.0

events: list[object] = []
_may_go_on = threading.Event()
weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)


def seen() -> list[object]:
    return events


def forget() -> None:
    events.clear()
    _may_go_on.clear()


def go_on() -> None:
    _may_go_on.set()


@rpc.register
def count_to(end: int) -> Iterator[int]:
    """Yields numbers, and notes each step and the end."""
    try:
        for number in range(end):
            events.append(number)
            yield number
    finally:
        events.append("closed")


def count_on(end: int) -> Iterator[int]:
    yield from range(end)


def fail_after(count: int) -> Iterator[int]:
    yield from range(count)
    raise LookupError("no more")


def wait_before(number: int) -> Iterator[int]:
    yield number
    assert _may_go_on.wait(LIMIT_S)
    yield number + 1


def until_cancelled() -> Iterator[int]:
    yield 0
    events.append("computes")
    while not rpc.is_cancelled():
        _may_go_on.wait(0.001)
    events.append("noticed")
    yield 1


def without_gradients(count: int) -> Iterator[bool]:
    with torch.no_grad():
        for _ in range(count):
            yield torch.is_grad_enabled()


def scaled(values: list[Tensor]) -> Iterator[Tensor]:
    for value in values:
        yield value * weight


def large(count: int) -> Iterator[Tensor]:
    for number in range(count):
        yield torch.full((200_000,), float(number))


def not_iterable() -> int:
    return 5


async def unawaited() -> list[int]:
    return [1]


async def asynchronous() -> AsyncIterator[int]:
    yield 1


def is_open(worker: str) -> Iterator[Any]:
    """Passes a stream of another worker on."""
    with rpc.stream(worker, count_on, (3,)) as numbers:
        yield from numbers


def take_one_and_wait(worker: str) -> None:
    """Takes a value of an endless stream, and is killed while it holds the stream."""
    numbers = rpc.stream(worker, count_to, (10**9,), ahead=2)
    next(numbers)
    rpc.rpc_sync(worker, wait_for_events, timeout=0)


def wait_for_events() -> None:
    _may_go_on.wait()


class Counter:
    """An actor with a state."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        self.value = start
        self.step = step

    def add(self, times: int = 1) -> int:
        self.value += times * self.step
        return self.value

    def where(self) -> str:
        return rpc.get_worker_info().name

    def fail(self) -> None:
        raise LookupError(f"failed at {self.value}")

    def pass_gate(self) -> str:
        if rpc.get_worker_info().name == "worker0":
            assert _may_go_on.wait(LIMIT_S)
        return rpc.get_worker_info().name

    @rpc.expose
    def values(self, count: int) -> Iterator[int]:
        for _ in range(count):
            yield self.add()

    @functions.batched
    def double(self, values: Tensor) -> Tensor:
        return values * 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Unrelated:
    def missing(self) -> Iterator[int]:
        yield 0


class Late:
    """Values that may be had when ``go_on`` is called."""

    def __init__(self) -> None:
        events.append("called")
        assert _may_go_on.wait(LIMIT_S)

    def __iter__(self) -> Iterator[int]:
        events.append("iterated")
        return iter(range(3))
