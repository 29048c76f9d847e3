"""Tests the checks of arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from torchweft.arguments import checked_int, did_you_mean, kind_of, limit_of, wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc import RpcBackendOptions, init_rpc


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


def test_kinds_have_articles() -> None:
    assert [kind_of(value) for value in (1, "x", None, [])] == ["an int", "a str", "None", "a list"]


def test_long_values_are_not_shown() -> None:
    assert "x" * 100 not in str(wrong_type("name", "x" * 100, "pass less"))
    assert str(wrong_type("name", "x", "pass 1")) == "name is 'x', a str; pass 1"


def test_integers_of_other_libraries_are_integers() -> None:
    assert checked_int("rank", numpy.int64(3)) == 3
    with pytest.raises(ArgumentTypeError, match=r"rank is 3\.0, a float; pass an integer"):
        checked_int("rank", 3.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_worker_threads", "4"),
        ("rpc_timeout", "4"),
        ("init_timeout", None),
        ("detection_time", "1"),
        ("init_method", 5),
        ("listen", 5),
        ("allowed_modules", "math"),
    ],
)
def test_options_of_wrong_types_are_type_errors(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{name} is "):
        RpcBackendOptions(**{name: value}).check()


@pytest.mark.parametrize("arguments", [{"rank": "0"}, {"world_size": "1"}])
def test_joining_with_texts_for_numbers(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ArgumentTypeError, match=f"{name} is '.', a str; pass an integer"):
        init_rpc("worker", **{"rank": 0, "world_size": 1, **arguments})


def test_near_names_are_suggested() -> None:
    names = ["forward", "backward", "train"]
    assert did_you_mean("foward", names) == "; did you mean 'forward'?"
    assert did_you_mean("evaluate", names) == ""
    assert did_you_mean("__call__", ["__le__", "__lt__"]) == ""
