from __future__ import annotations

import functools
import math
import threading
from typing import Any

import pytest

from torchweft.agent.calls import PendingCall, function_name
from torchweft.errors import CallTimeout
from torchweft.wire.frames import Frame

LIMIT_S = 20.0


def new_call(timeout_s: float = math.inf) -> PendingCall:
    return PendingCall(1, "callee", "module:function", timeout_s)


def test_a_call_is_open_until_it_is_finished() -> None:
    call = new_call()
    assert not call.is_done
    assert not call.has_outcome
    assert not call.wait(0.0)
    assert not call.wait(-5.0)
    call.frame = Frame(4, 0, 1, b"", ())
    assert call.has_outcome
    call.finish()
    assert call.is_done
    assert call.wait(0.0)
    assert call.wait(math.inf)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e30, threading.TIMEOUT_MAX + 1, 20.0])
def test_all_who_wait_are_woken(timeout_s: float) -> None:
    call = new_call()
    outcomes: list[bool] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(call.wait(timeout_s))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    call.finish()
    for thread in threads:
        thread.join(LIMIT_S)
    assert outcomes == [True] * 4


def test_the_deadline_is_counted_from_the_start() -> None:
    call = new_call(5.0)
    assert call.deadline_s == call.started_s + 5.0
    assert 0.0 <= call.elapsed_s < 5.0
    assert new_call().deadline_s == math.inf


def test_a_timeout_says_what_where_and_what_to_do() -> None:
    error = new_call(0.25).timeout_error()
    assert isinstance(error, CallTimeout)
    assert isinstance(error, TimeoutError)
    assert error.worker == "callee"
    assert error.call == "module:function"
    assert error.elapsed_s >= 0.0
    assert "ran for more than set timeout (250 ms)" in str(error)
    assert "longer timeout=" in str(error)


class Callable:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("text", "text"),
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


class Caller:
    name = "caller"


class Parent:
    """Stands in for the call of another worker in whose course a call is made."""

    peer = Caller()

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s


def test_a_nested_call_that_was_cut_short_says_by_whom() -> None:
    parent: Any = Parent(0.0)
    call = PendingCall(1, "callee", "module:function", 5.0, None, parent)
    assert "the limit was that of worker 'caller'" in str(call.timeout_error())
    parent.deadline_s = math.inf
    assert "'caller'" not in str(call.timeout_error())


def test_a_nested_call_whose_parent_was_cancelled_says_so() -> None:
    parent: Any = Parent(math.inf)
    error = PendingCall(1, "callee", "module:function", 5.0, None, parent).orphan_error()
    assert "called for worker 'caller', which has given up" in str(error)
    assert (error.worker, error.call) == ("callee", "module:function")
