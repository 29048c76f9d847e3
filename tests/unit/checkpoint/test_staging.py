from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.checkpoint import parts as checkpoint_parts
from torchweft.checkpoint.parts import StagedParts
from torchweft.engine.worker.agent import Slots
from torchweft.errors import CheckpointError

DRIVER, OTHER = (SimpleNamespace(id=n, name=f"worker{n}", lost=None) for n in (1, 2))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Any], None]]:
    """Returns the callbacks registered for lost workers."""
    callbacks: list[Callable[[Any], None]] = []
    agent = SimpleNamespace(
        on_lost=callbacks.append,
        slots=Slots(),
        info=SimpleNamespace(name="worker0"),
    )
    monkeypatch.setattr(checkpoint_parts, "current", lambda: agent)
    return callbacks


def test_a_part_is_taken_out_once(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.keep("ticket", DRIVER, "part")
    assert checkpoint_parts.staged_parts() is parts
    assert parts.take_out("ticket", DRIVER) == "part"
    with pytest.raises(
        CheckpointError, match="'worker0' holds nothing of this snapshot for worker 'worker1'"
    ):
        parts.take_out("ticket", DRIVER)


def test_what_a_lost_driver_had_taken_is_dropped(told: list[Callable[[Any], None]]) -> None:
    parts: StagedParts = checkpoint_parts.staged_parts()
    for ticket, driver in (("a", DRIVER), ("b", OTHER), ("c", DRIVER)):
        parts.keep(ticket, driver, ticket)
    (tell,) = told
    tell(SimpleNamespace(id=1))
    assert len(parts) == 1
    assert parts.take_out("b", OTHER) == "b"


def test_dropping_what_is_not_there_does_nothing(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.keep("a", DRIVER, "part")
    parts.drop("b", DRIVER)
    parts.drop("a", DRIVER)
    assert len(parts) == 0


def test_a_part_that_nobody_waits_for_any_more_is_not_held(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.drop("given up while it was copied", DRIVER)
    parts.keep("given up while it was copied", DRIVER, "part")
    parts.keep("its driver is lost", SimpleNamespace(id=3, lost="is lost"), "part")
    assert len(parts) == 0


def test_the_ticket_of_another_driver_is_of_no_use(told: Any) -> None:
    parts = checkpoint_parts.staged_parts()
    parts.drop("ticket", OTHER)
    parts.keep("ticket", DRIVER, "part")
    parts.drop("ticket", OTHER)
    parts.keep("ticket", OTHER, "another")
    with pytest.raises(CheckpointError, match=r"'worker0' holds nothing .* 'worker2'"):
        parts.take_out("ticket", OTHER)
    assert parts.take_out("ticket", DRIVER) == "part"
