from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.agent.agent import Slots
from torchweft.checkpoint import parts as checkpoint_parts
from torchweft.checkpoint.parts import StagedParts
from torchweft.errors import CheckpointError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Any], None]]:
    """Returns the callbacks registered for lost workers."""
    callbacks: list[Callable[[Any], None]] = []
    agent = SimpleNamespace(
        on_lost=callbacks.append,
        slots=Slots(),
        info=SimpleNamespace(name="worker0"),
        peers=[SimpleNamespace(lost=None)] * 3 + [SimpleNamespace(lost="is lost")],
    )
    monkeypatch.setattr(checkpoint_parts, "current", lambda: agent)
    return callbacks


def test_a_part_is_taken_out_once(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.keep("ticket", 0, "part")
    assert checkpoint_parts.staged_parts() is parts
    assert parts.take_out("ticket") == "part"
    with pytest.raises(CheckpointError, match="'worker0' holds nothing"):
        parts.take_out("ticket")


def test_what_a_lost_driver_had_taken_is_dropped(told: list[Callable[[Any], None]]) -> None:
    parts: StagedParts = checkpoint_parts.staged_parts()
    for ticket, driver in (("a", 1), ("b", 2), ("c", 1)):
        parts.keep(ticket, driver, ticket)
    (tell,) = told
    tell(SimpleNamespace(id=1))
    assert len(parts) == 1
    assert parts.take_out("b") == "b"


def test_dropping_what_is_not_there_does_nothing(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.keep("a", 1, "part")
    parts.drop("b")
    parts.drop("a")
    assert len(parts) == 0


def test_a_part_that_nobody_waits_for_any_more_is_not_held(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.drop("given up while it was copied")
    parts.keep("given up while it was copied", 1, "part")
    parts.keep("its driver is lost", 3, "part")
    assert len(parts) == 0
