"""Names of functions in the errors of calls."""

from __future__ import annotations

import threading

import pytest

from tests.unit.engine.protocol.entries import Asked
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


def test_a_caller_that_was_interrupted_is_told_that_the_answer_is_lost() -> None:
    error = calls.interrupted(Asked(2))
    assert "interrupted while it read the answer of module:function" in str(error)
    assert (error.worker, error.call) == ("worker2", "module:function")
