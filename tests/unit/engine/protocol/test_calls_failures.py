"""Names of functions in the errors of calls."""

from __future__ import annotations

import functools
import threading

import pytest

from tests.unit.engine.protocol.entries import Asked
from torchweft import knobs
from torchweft.engine.protocol import calls
from torchweft.engine.protocol.calls import function_name


class Callable:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("text", "text"),
        (b"module:function\xff", "module:function\\xff"),
        ((lambda first, last: f"{first}.{last}", "a", "b"), "a.b"),
        (threading.Thread, "threading.Thread"),
        (Callable().method, f"{__name__}.Callable.method"),
        (len, "builtins.len"),
        ([].append, "list.append"),
    ],
)
def test_names_of_functions(function: object, name: str) -> None:
    assert function_name(function) == name  # type: ignore[arg-type]


def test_what_has_no_name_is_described() -> None:
    assert "functools.partial" in function_name(functools.partial(len))


def test_the_callee_names_the_limits_by_which_it_refuses() -> None:
    error = calls.too_many_waiting("callee", "caller")
    assert error.worker == "callee"
    assert "too many calls of worker 'caller' waiting" in str(error)
    assert knobs.QUEUE_LIMIT_CALLS.variable in str(error)


def test_a_result_that_is_not_sent_or_is_no_future_is_named() -> None:
    assert "MemoryError was raised" in str(calls.not_sendable("callee", MemoryError("no room")))
    assert "but module.f, marked by async_execution, returned a int" in str(
        calls.no_future("module.f", 3)
    )


def test_a_caller_that_was_interrupted_is_told_that_the_answer_is_lost() -> None:
    error = calls.interrupted(Asked(2))
    assert "interrupted while it read the answer of module:function" in str(error)
    assert (error.worker, error.call) == ("worker2", "module:function")
