from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce.world import (
    not_on_rank,
    on_rank,
    rank_all,
    rank_non_zero_only,
    rank_zero_only,
)

SIZE = 4


def add(first: int, second: int = 1) -> int:
    """Adds."""
    return first + second


def ranks_that_run(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    results = {}
    for rank in range(SIZE):
        monkeypatch.setenv("RANK", str(rank))
        results[rank] = function(3, second=4)
    assert set(results.values()) <= {7, None}
    return [rank for rank, result in results.items() if result == 7]


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        (on_rank(1), [1]),
        (on_rank(1, 3, 9), [1, 3]),
        (on_rank(), []),
        (on_rank(np.int64(2)), [2]),
        (not_on_rank(1), [0, 2, 3]),
        (not_on_rank(1, 3, 9), [0, 2]),
        (not_on_rank(), [0, 1, 2, 3]),
        (rank_all, [0, 1, 2, 3]),
        (rank_zero_only, [0]),
        (rank_non_zero_only, [1, 2, 3]),
    ],
)
def test_who_runs_it_is_found_out_when_it_is_called(
    decorator: Callable[..., Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = decorator(add)
    assert (function.__name__, function.__doc__) == ("add", "Adds.")
    assert ranks_that_run(function, monkeypatch) == expected


@pytest.mark.parametrize("decorator", [on_rank, not_on_rank])
@pytest.mark.parametrize("rank", [add, "0", 1.0, None, range(2), [0]])
def test_what_is_no_rank_is_refused(decorator: Callable[..., Any], rank: object) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{decorator.__name__} takes ranks") as caught:
        decorator(0, rank)
    assert isinstance(caught.value, TypeError)
    assert (f"write @{decorator.__name__}(0)" in str(caught.value)) == callable(rank)


@pytest.mark.parametrize("decorator", [on_rank, not_on_rank])
def test_ranks_are_not_counted_from_the_end(decorator: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="rank -1; ranks go from 0 on"):
        decorator(0, -1)


@pytest.mark.parametrize("decorator", [on_rank(0), rank_zero_only, rank_non_zero_only])
def test_what_is_no_function_is_refused(decorator: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentTypeError, match="and 0 is none"):
        decorator(0)
