"""Functions by value in calls between two workers: nothing is stale."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

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


# Errors


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
