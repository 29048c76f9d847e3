"""Queues in a pair of workers: what is written, and calls of threads of the worker itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.rpc.pair import LIMIT_S, Pair, pair_of
from torchweft.errors import ConfigurationError
from torchweft.rpc.batching import _QUEUES
from torchweft.rpc.functions import BatchStatistics, batch_statistics, batched

_may_go_on = threading.Event()
_began = threading.Event()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as pair:
        yield pair


@batched(largest=8, smallest=8, longest_wait=LIMIT_S)
def eight(values: Tensor) -> Tensor:
    return values + 1


@batched(largest=2, limit=2)
def gated(values: Tensor) -> Tensor:
    _began.set()
    assert _may_go_on.wait(LIMIT_S)
    return values


@batched
def recursive(values: Tensor) -> Tensor:
    return recursive(values)


@batched
def reading_nothing() -> None:
    """Takes nothing, returns nothing."""


def test_threads_of_the_worker_are_not_refused(pair: Pair) -> None:
    _may_go_on.clear()
    _began.clear()
    results: list[float] = []

    def call(number: int) -> None:
        results.append(gated(torch.tensor(float(number))).item())

    threads = [threading.Thread(target=call, args=(each,)) for each in range(8)]
    threads[0].start()
    assert _began.wait(LIMIT_S)
    for thread in threads[1:]:
        thread.start()
    _may_go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(results) == [float(each) for each in range(8)]
    found = batch_statistics(gated)
    assert found.calls == 8
    assert max(found.sizes) <= 2
    assert found.refused == 0


def test_a_batch_that_waits_for_itself_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigurationError, match="within a batch of its own"):
        recursive(torch.ones(1))


def test_a_function_without_arguments(pair: Pair) -> None:
    assert pair.sync(reading_nothing) is None
    assert batch_statistics(reading_nothing).sizes == {1: 1}


class Slotted:
    __slots__ = ()

    @batched
    def method(self, values: Tensor) -> Tensor:
        return values


class Owner:
    @batched
    def method(self, values: Tensor) -> Tensor:
        return values * 2

    @classmethod
    @batched
    def of_class(cls, values: Tensor) -> Tensor:
        return values * 3

    @staticmethod
    @batched
    def static(values: Tensor) -> Tensor:
        return values * 4


def test_each_object_has_its_own_queue(pair: Pair) -> None:
    one, other = Owner(), Owner()
    assert one.method(torch.ones(1)).item() == 2.0
    assert Owner.of_class(torch.ones(1)).item() == 3.0
    assert Owner.static(torch.ones(1)).item() == 4.0
    assert batch_statistics(one.method).calls == 1
    assert batch_statistics(Owner.method, one).calls == 1
    assert batch_statistics(other.method) == BatchStatistics()
    batches = Owner.method._weft_batches  # type: ignore[attr-defined]
    queues = pair.callee.agent.slots[_QUEUES]
    assert queues.find(batches, one) is not None
    count = len(queues)
    del one
    assert len(queues) == count - 1
    with pytest.raises(TypeError, match="__weakref__"):
        Slotted().method(torch.ones(1))


def test_mistakes() -> None:
    with pytest.raises(ConfigurationError, match="ascending"):
        batched(largest=2, smallest=3)
    with pytest.raises(ConfigurationError, match="longest_wait"):
        batched(longest_wait=float("inf"))
    with pytest.raises(TypeError, match="below @staticmethod"):
        batched(staticmethod(eight))
    with pytest.raises(TypeError, match="async def"):

        @batched
        async def soon() -> None: ...

    with pytest.raises(TypeError, match="is a generator"):

        @batched
        def values() -> Iterator[int]:
            yield 1

    for option in ({"largest": 3.5}, {"smallest": "1"}, {"longest_wait": "1"}, {"pad": "0"}):
        with pytest.raises(TypeError, match=next(iter(option))):
            batched(**option)  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="batched decorates"):
        batch_statistics(print)
