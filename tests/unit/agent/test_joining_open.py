from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from torchweft.agent.rendezvous import enter, join, note_left
from torchweft.errors import ConfigurationError, RendezvousError, RendezvousTimeout
from torchweft.protocol.membership import joining
from torchweft.protocol.membership.joining import Admission
from torchweft.protocol.membership.registration import FIRST_LATER_ID, Registration

LIMIT_S = 10.0


def come(store: HashStore, name: str, rank: int) -> Admission:
    return enter(store, Registration(name, rank, ("unix:@x",)), LIMIT_S)


def test_those_who_come_later_see_those_who_came_earlier() -> None:
    store = HashStore()
    first, second, third = (come(store, name, rank) for rank, name in enumerate("abc"))
    assert (first.place, second.place, third.place) == (1, 2, 3)
    assert first.earlier == {}
    assert second.earlier == {1: first.me}
    assert third.earlier == {1: first.me, 2: second.me}
    assert first.token == second.token == third.token
    assert len(first.token) == 32


def test_who_has_left_is_not_seen() -> None:
    store = HashStore()
    first, second = come(store, "a", 0), come(store, "b", 1)
    note_left(store, first.place)
    assert come(store, "c", 2).earlier == {2: second.me}


def test_who_wrote_in_another_run_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "UNWRITTEN_S", 0.01)
    old, store = HashStore(), HashStore()
    stale = come(old, "a", 0)
    store.add("members", 1)
    store.set(f"member/1/{stale.token}", old.get(f"member/1/{stale.token}"))
    assert come(store, "b", 1).earlier == {}


def test_an_id_names_one_life() -> None:
    store = HashStore()
    lives = [come(store, "a", 3).me for _ in range(3)]
    assert [life.id for life in lives] == [3, FIRST_LATER_ID, FIRST_LATER_ID + 1]
    assert [life.rank for life in lives] == [3, 3, 3]
    other = come(store, "b", 4).me
    assert (other.id, other.rank) == (4, 4)
    assert Registration.decode(lives[1].encode()) == lives[1]


def test_of_two_who_come_at_once_one_sees_the_other() -> None:
    store = HashStore()
    came: list[Admission] = []
    threads = [
        threading.Thread(target=lambda rank=rank: came.append(come(store, f"w{rank}", rank)))
        for rank in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    by_place = {admitted.place: admitted for admitted in came}
    assert sorted(by_place) == list(range(1, 9))
    for place, admitted in by_place.items():
        assert admitted.earlier == {other: by_place[other].me for other in range(1, place)}


def test_one_that_died_before_it_said_who_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "UNWRITTEN_S", 0.01)
    store = HashStore()
    store.add("members", 1)
    assert come(store, "a", 0).earlier == {}
    assert "worker number 1 of the group has not published its registration" in caplog.text


def test_ranks_and_lives_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with pytest.raises(ConfigurationError, match="rank 16384 is too high"):
        come(store, "a", FIRST_LATER_ID)
    monkeypatch.setattr(joining, "ID_LIMIT", FIRST_LATER_ID + 1)
    for _ in range(2):
        come(store, "a", 0)
    with pytest.raises(ConfigurationError, match="start a new group"):
        come(store, "a", 0)


def test_a_closed_group_stays_closed_and_an_open_one_open() -> None:
    store = HashStore()
    join(store, Registration("a", 0, ("unix:@x",)), 1, LIMIT_S)
    with pytest.raises(RendezvousError, match=r"mixes statically and dynamically.*is closed"):
        come(store, "b", 1)
    store = HashStore()
    come(store, "b", 1)
    with pytest.raises(RendezvousError, match=r"mixes statically and dynamically.*is open"):
        join(store, Registration("a", 0, ("unix:@x",)), 1, LIMIT_S)


class BrokenStore:
    """A store whose server has gone."""

    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("connection reset")

    set = compare_set


def test_a_store_that_does_not_answer() -> None:
    with pytest.raises(RendezvousTimeout, match=r"store did not answer.*connection reset"):
        enter(BrokenStore(), Registration("a", 0, ()), 0.0)
    with pytest.raises(RendezvousError, match="connection reset"):
        enter(BrokenStore(), Registration("a", 0, ()), LIMIT_S)
    note_left(BrokenStore(), 1)
