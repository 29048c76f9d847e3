"""Queues in a pair of workers: what is written, and calls of threads of the worker itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.rpc.pair import LIMIT_S, Pair, pair_of
from torchweft.errors import ConfigurationError
from torchweft.rpc.functions import batch_statistics, batched


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as pair:
        yield pair


@batched(largest=8, smallest=8, longest_wait=LIMIT_S)
def eight(values: Tensor) -> Tensor:
    return values + 1


@batched
def recursive(values: Tensor) -> Tensor:
    return recursive(values)


@batched
def reading_nothing() -> None:
    """Takes nothing, returns nothing."""


def test_a_batch_that_waits_for_itself_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigurationError, match="within a batch of its own"):
        recursive(torch.ones(1))


def test_a_function_without_arguments(pair: Pair) -> None:
    assert pair.sync(reading_nothing) is None
    assert batch_statistics(reading_nothing).sizes == {1: 1}


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
