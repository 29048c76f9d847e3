"""Functions by value in calls between two workers: nothing is stale."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.futures import Future as PlainFuture

from tests.unit.engine.worker.group import wait_until
from tests.unit.rpc.pair import LIMIT_S, Pair, pair_of
from torchweft.engine.worker.calls import PendingCall
from torchweft.errors import SerializationError
from torchweft.rpc import calls, observed
from torchweft.rpc.functions import async_execution

scale = 10
_seen: list[Any] = []


@pytest.fixture
def local() -> Iterator[Pair]:
    with pair_of(4) as made:
        yield made


def made(value: Any) -> Any:
    """Returns a function with code of its own."""
    namespace: dict[str, Any] = {"__name__": "made"}
    exec(f"def function(x=0): return x, {value!r}", namespace)
    return namespace["function"]


def apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("way", ["sync", "start", "create"])
@pytest.mark.parametrize("kind", ["called", "argument", "key", "nested", "both"])
def test_functions_anywhere_in_a_call_in_every_way(local: Pair, way: str, kind: str) -> None:
    number = 3
    function = lambda x=1: x + number  # noqa: E731
    args: tuple[Any, ...] = {
        "called": (function, 1),
        "argument": (apply, function, 1),
        "key": (lambda x, y=0: x + y + 2, 1, 1),
        "nested": (lambda functions: functions["a"][0](1), {"a": [function]}),
        "both": (lambda inner, x: inner(x), function, 1),
    }[kind]
    for _ in range(3):
        if way == "sync":
            assert local.sync(*args) == 4
        elif way == "start":
            assert local.start(*args).wait() == 4
        else:
            assert local.fetch(local.create(*args)) == 4


def test_keyword_arguments(local: Pair) -> None:
    def function(a: int, *, key: Any = None) -> Any:
        return a, key

    for key in (1, [2], lambda: 3):
        kwargs = {"key": key}
        a, value = calls.call_and_wait(local.caller, local.peer, function, (1,), kwargs, LIMIT_S)
        assert (a, value() if callable(value) else value) == (1, 3 if callable(key) else key)


def test_functions_in_results_travel_whole(local: Pair) -> None:
    assert local.sync(lambda: lambda x: x * scale)(2) == 20


def test_calls_to_oneself(local: Pair) -> None:
    caller, me, number = local.caller, local.caller.agent.me, 2
    tensor = torch.ones(1)
    result = calls.call_and_wait(caller, me, lambda x: (x + number, tensor), (1,), {}, LIMIT_S)
    assert result == (3, tensor)
    assert result[1] is tensor


# Nothing is stale, and nothing is shared


def test_what_changes_between_calls_is_seen(local: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    number, seen = 1, [1]

    def function() -> Any:
        return number, seen, scale, function.mark  # type: ignore[attr-defined]

    def plain(more: int = 0) -> Any:
        return number, seen, scale, more

    for value in range(2, 6):
        function.mark = value  # type: ignore[attr-defined]
        plain.__defaults__ = (value,)
        assert local.sync(function) == local.sync(plain) == (number, seen, scale, value)
        number = value
        seen.append(value)
        monkeypatch.setitem(globals(), "scale", value)


def test_a_call_does_not_see_what_another_one_has_changed(local: Pair) -> None:
    seen, number = [1], 0

    def function() -> Any:
        nonlocal number
        global scale
        number += 1
        scale += 1
        seen.append(number)
        function.calls = getattr(function, "calls", 0) + 1  # type: ignore[attr-defined]
        return seen, number, scale, function.calls  # type: ignore[attr-defined]

    def plain(more: Any = (), extra: dict[str, int] = {}) -> Any:  # noqa: B006
        nonlocal number
        global scale
        number, scale = number + 1, scale + 1
        extra["key"] = extra.get("key", 0) + 1
        return number, scale, extra

    for _ in range(3):
        assert local.sync(function) == ([1, 1], 1, 11, 1)
        assert local.sync(plain) == (1, 11, {"key": 1})
    assert (seen, number, scale) == ([1], 0, 10)


def test_captured_and_passed_objects_stay_one_object(local: Pair) -> None:
    shared, tensor = [1], torch.ones(2)
    assert local.sync(lambda x: x is shared, shared)
    assert local.sync(lambda x, y: x is tensor and y[0] is shared, tensor, [shared])
    inner = lambda: shared  # noqa: E731
    assert local.sync(lambda x: inner() is x, shared)


def test_functions_that_share_globals_share_them_at_the_callee(local: Pair) -> None:
    namespace: dict[str, Any] = {"__name__": "made", "total": 1}
    source = "def add(get):\n global total\n total += 1\n return get()\ndef get(): return total"
    exec(source, namespace)
    for _ in range(2):
        assert local.sync(namespace["add"], namespace["get"]) == 2


# What functions take along


@pytest.mark.parametrize("size", [2, 1 << 20])
def test_captured_tensors_and_their_gradients(local: Pair, size: int) -> None:
    tensor = torch.ones(size, requires_grad=True)
    sparse = torch.eye(2).to_sparse()
    for _ in range(2):
        assert local.sync(lambda x: (tensor * x).sum(), 2).item() == 2 * size
        leaf, grad = local.sync(lambda: (tensor.is_leaf, tensor.requires_grad))
        assert leaf
        assert grad
        assert local.sync(lambda: sparse.to_dense().sum()).item() == 2
    state = {"tensor": tensor}
    assert local.sync(lambda x: state["tensor"] is x, tensor)
    inner = lambda: tensor  # noqa: E731
    for _ in range(2):
        assert local.sync(lambda x: inner() is x, tensor)


def test_functions_whose_result_comes_later(local: Pair) -> None:
    number = 2

    async def soon(x: int) -> int:
        await asyncio.sleep(0)
        return x + number

    @async_execution
    def later(x: int) -> PlainFuture[int]:
        future: PlainFuture[int] = PlainFuture()
        future.set_result(x + number)
        return future

    for _ in range(2):
        assert local.sync(soon, 1) == 3
        assert local.sync(later, 1) == 3


# Errors


def test_errors_are_those_of_functions_that_travel_whole(local: Pair) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"variable 'lock'|lock"):
        local.sync(lambda: lock)
    with pytest.raises(SerializationError, match=r"args\[0\]|lock"):
        local.sync(lambda x: x, lock)
    with pytest.raises(ZeroDivisionError):
        local.sync(lambda: 1 / 0)
    with pytest.raises(TypeError, match="positional argument"):
        local.sync(lambda x: x)


def test_a_module_that_the_callee_lacks_is_its_answer(
    local: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_there")
    monkeypatch.setitem(sys.modules, "only_there", module)
    function = lambda: module.__name__  # noqa: E731
    with monkeypatch.context() as context:
        request = local.caller.encoder.request(local.peer, function, (), {}, LIMIT_S)
        context.delitem(sys.modules, "only_there")
        call = PendingCall(local.peer.id, local.peer.name, function, LIMIT_S)
        local.caller.agent.calls.ask_and_wait(local.peer, call, request)
        with pytest.raises(SerializationError, match="No module named 'only_there'"):
            local.caller.result_of(call)
    assert local.sync(function) == "only_there"


def _wait_for_gate() -> None:
    assert _seen[0].wait(LIMIT_S)


# What is known of a function


def test_a_report_names_calls_that_wait(local: Pair) -> None:
    gate = threading.Event()
    _seen[:] = [gate]
    held = [local.start(lambda: _wait_for_gate()) for _ in range(4)]
    wait_until(lambda: len(local.callee.agent.reactor.tasks) == 0)
    late = local.start(made("late"))
    wait_until(lambda: len(local.callee.agent.reactor.tasks) == 1)
    names = {status.function for status in observed.calls_of(local.callee)}
    assert "a function sent by value" in names
    gate.set()
    for future in (*held, late):
        future.wait()
