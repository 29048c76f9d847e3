"""Futures in order of completion; ``tests/contract/processes`` covers calls to several workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweft.errors import ArgumentTypeError
from torchweft.rpc.calls import as_completed

LIMIT_S = 20.0


def futures(count: int) -> list[torch.futures.Future[Any]]:
    return [torch.futures.Future() for _ in range(count)]


def test_two_iterators_go_over_the_same_futures() -> None:
    made = futures(2)
    both = as_completed(made, LIMIT_S), as_completed(made, LIMIT_S)
    for future in made:
        future.set_result(None)
    assert [list(done) for done in both] == [made, made]


def test_an_iterator_that_nobody_ends_keeps_nothing() -> None:
    first, second = futures(2)
    done = as_completed([first, second], LIMIT_S)
    first.set_result(1)
    assert next(done) is first
    del done
    second.set_result(2)
    assert second.wait() == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.futures.Future(), "several futures"),
        (3, "several futures"),
        ([3], "what rpc_async returns"),
    ],
)
def test_what_is_no_future_is_refused_at_once(given: Any, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        as_completed(given)
