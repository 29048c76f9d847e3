"""Tests errors that are RuntimeErrors in addition to their original type."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from tests.unit.serialize.test_exceptions import Keyword, raised
from torchweft.errors import CallTimeout
from torchweft.serialize.exceptions import fresh_copy, pack_error, unpack_error
from torchweft.serialize.runtime_errors import as_runtime_error


def both(error: BaseException) -> BaseException:
    return as_runtime_error(unpack_error(pack_error(raised(error), "w")))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("missing"),
        FileNotFoundError(2, "no such file", "/data"),
        AssertionError("not ready"),
        ValueError("bad"),
        StopIteration(3),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
        Keyword(code=3, where="here"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_what_it_was_and_a_runtime_error(error: Exception) -> None:
    arrived: Any = both(error)
    for each in (arrived, fresh_copy(arrived)):
        assert isinstance(each, RuntimeError)
        assert isinstance(each, type(error))
        assert type(each).__name__ == type(error).__name__
        assert (str(each), each.args) == (str(error), error.args)
        assert {**vars(each), "__notes__": []} == {**vars(error), "__notes__": []}
    if isinstance(error, OSError):
        assert (arrived.errno, arrived.filename) == (2, "/data")


@pytest.mark.parametrize("error", [KeyError("missing"), FileNotFoundError(2, "no", "/data")])
def test_it_survives_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(both(error)))
    assert isinstance(copy, RuntimeError)
    assert isinstance(copy, type(error))
    assert str(copy) == str(error)


def test_another_worker_gets_the_original_type() -> None:
    try:
        raise both(Keyword(code=3, where="here"))
    except Keyword as caught:
        arrived = unpack_error(pack_error(caught, "nearer"))
    assert type(arrived) is Keyword
    assert arrived.code == 3
    assert "in test_another_worker" in arrived.__notes__[-1]  # type: ignore[attr-defined]


def test_what_is_one_already_or_cannot_be_one_stays() -> None:
    timeout = CallTimeout("late")
    assert as_runtime_error(timeout) is timeout
    cancelled = asyncio.CancelledError()
    assert as_runtime_error(cancelled) is cancelled

    class Unfriendly(Exception):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    error = Unfriendly("x")
    assert as_runtime_error(error) is error


def test_a_type_is_made_once() -> None:
    assert type(both(KeyError("a"))) is type(both(KeyError("b")))
