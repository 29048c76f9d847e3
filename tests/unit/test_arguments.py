"""Tests the checks of arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchweft.arguments import limit_of
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc import init_rpc


@pytest.mark.parametrize(
    ("timeout", "limit_s"),
    [(5, 5), (0.5, 0.5), (0, math.inf), (-1, 60.0), (-1.0, 60.0), (math.inf, math.inf)],
)
def test_a_time_limit(timeout: float, limit_s: float) -> None:
    assert limit_of(timeout, 60.0) == limit_s


@pytest.mark.parametrize("timeout", [-2, -0.1, math.nan])
def test_what_is_no_time_limit(timeout: float) -> None:
    with pytest.raises(ConfigurationError, match="timeout is"):
        limit_of(timeout, 60.0)


@pytest.mark.parametrize("arguments", [{"rank": "0"}, {"world_size": "1"}])
def test_joining_with_texts_for_numbers(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ArgumentTypeError, match=f"{name} is '.', a str; pass an integer"):
        init_rpc("worker", **{"rank": 0, "world_size": 1, **arguments})
