"""Functions by value in calls between two workers: nothing is stale."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.rpc.pair import LIMIT_S, Pair, pair_of
from torchweft.engine.worker.calls import PendingCall
from torchweft.errors import SerializationError

scale = 10


@pytest.fixture
def local() -> Iterator[Pair]:
    with pair_of(4) as made:
        yield made


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
