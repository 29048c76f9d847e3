"""What trainers meet at, without workers: their losses are told by the test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torchweft import extending
from torchweft.embedding import meeting
from torchweft.embedding.meeting import Meeting
from torchweft.embedding.steps import Steps
from torchweft.errors import ConfigurationError, WorkerLost

TRAINERS = ("trainer0", "trainer1")


class Room(Meeting[str]):
    """Where two trainers push text."""

    def __init__(self, name: str = "words") -> None:
        super().__init__(name, Steps(TRAINERS, 0, "ps0"), [(each,) for each in TRAINERS])


class Losses:
    """In place of the agent: those who are told of lost workers, and who calls."""

    def __init__(self) -> None:
        self.told: list[Callable[[WorkerLost], None]] = []
        self.caller = SimpleNamespace(id=1, name="trainer1")

    def listen(self, call: Callable[[WorkerLost], None]) -> Callable[[], None]:
        self.told.append(call)
        return lambda: self.told.remove(call)

    def tell(self, worker: str) -> None:
        for call in list(self.told):
            call(WorkerLost(worker, worker=worker))


@pytest.fixture(autouse=True)
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    found = Losses()
    monkeypatch.setattr(extending, "on_worker_lost", found.listen)
    monkeypatch.setattr(meeting, "get_worker_info", lambda: SimpleNamespace(name="ps0"))
    monkeypatch.setattr(meeting, "caller", lambda: found.caller)
    return found


def use(name: str = "words") -> Room:
    return Room.use(name, lambda: Room(name), lambda _: None)


def test_a_user_that_does_not_fit_is_not_counted() -> None:
    def refuse(_: Room) -> None:
        raise ConfigurationError("another one")

    first = use()
    with pytest.raises(ConfigurationError, match="another one"):
        Room.use("words", Room, refuse)
    assert first.users == {1: 1}
    first.close()
    assert "words" not in Room.named


def test_a_name_is_free_after_its_last_use() -> None:
    first = use()
    use()
    first.close()
    assert use() is first
    first.close()
    first.close()
    with pytest.raises(ConfigurationError):
        first.close()
    second = use()
    assert second is not first
    assert second.users == {1: 1}
    with pytest.raises(ConfigurationError):
        first.close()
    assert use() is second


def test_a_worker_ends_only_its_own_uses(losses: Losses) -> None:
    first = use()
    losses.caller = SimpleNamespace(id=2, name="liar")
    with pytest.raises(ConfigurationError, match=r"'liar' does not use tables 'words' on .* 'ps0'"):
        first.close()
    use().close()
    assert first.users == {1: 1}
    assert use() is first


def test_an_object_lives_as_long_as_its_users_and_is_told_of_losses(losses: Losses) -> None:
    room = use()
    use()
    assert len(losses.told) == 1
    due = room.steps.push(0, 0, "a", 0)
    future = room.await_answer(0, 0)
    assert not due.applied
    assert room.missing() == ["trainer1"]
    losses.tell("worker1")
    assert not future.done()
    losses.tell("trainer1")
    assert future.done()
    del room, due, future
    gc.collect()
    assert not losses.told  # Nobody holds it: the registry does not.
    assert "words" not in Room.named
