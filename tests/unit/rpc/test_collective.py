"""A gathering ends once, with the values or with an error, and is forgotten then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.engine.threads.reports import LongWaits
from torchweft.errors import CallError, CallTimeout, NotInitialized, WorkerLost
from torchweft.rpc.collective import Gatherings, Key, failure


def test_what_others_are_told_can_travel() -> None:
    class Local(Exception):
        """Cannot be rebuilt elsewhere."""

    error = failure(Local("why"), "all_gather", "b")
    assert type(error) is CallError
    assert str(error) == "worker 'b' failed in all_gather: Local: why"
    assert (error.worker, error.call) == ("b", "all_gather")


KEY = Key((0, 1, 2), "barrier", 0)


def member(number: int, me: int = 0) -> Any:
    lost = WorkerLost("gone", worker=f"worker{number}")
    name = f"worker{number}"
    return SimpleNamespace(
        id=number, name=name, is_self=number == me, lost=None, info=name, lost_error=lambda: lost
    )


def gatherings_of(me: int) -> tuple[Gatherings, list[Any]]:
    """Returns the gatherings of one of three workers; messages to the others go nowhere."""
    peers = [member(number, me) for number in range(3)]
    agent: Any = SimpleNamespace(
        me=peers[me],
        info=SimpleNamespace(name=peers[me].name),
        peers=dict(enumerate(peers)),
        reactor=SimpleNamespace(submit=lambda *_: None),
    )
    return Gatherings(agent, LongWaits("worker")), peers


def test_the_leader_forgets_a_gathering_when_all_have_arrived() -> None:
    gatherings, peers = gatherings_of(0)
    for number in (2, 0, 1):
        gathering = gatherings.brought(KEY, peers[number], number)
    assert gathering.values() == {f"worker{number}": number for number in (2, 0, 1)}
    assert len(gatherings) == 0


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_value_that_comes_too_late_ends_the_gathering_unless_it_came_nevertheless(
    has_arrived: bool,
) -> None:
    gatherings, peers = gatherings_of(0)
    gathering = gatherings.brought(KEY, peers[2 if has_arrived else 1], 1)
    gatherings.withdrawn(KEY, peers[2], CallTimeout("too late"))
    assert gathering.has_ended is not has_arrived


def test_a_value_that_comes_too_late_for_a_gathering_that_has_ended_begins_none() -> None:
    gatherings, peers = gatherings_of(0)
    gatherings._numbers[KEY.workers, KEY.kind] = 1
    gatherings.withdrawn(KEY, peers[2], CallTimeout("too late"))
    assert len(gatherings) == 0
    gatherings.withdrawn(KEY._replace(number=1), peers[2], CallTimeout("too late"))
    assert len(gatherings) == 1  # The others have not come yet, and will be told.


def test_a_failed_gathering_is_kept_until_all_have_arrived_or_are_lost() -> None:
    gatherings, peers = gatherings_of(0)
    gathering = gatherings.brought(KEY, peers[0], 0)
    gatherings.peer_lost(peers[1])
    with pytest.raises(WorkerLost, match="gone"):
        gathering.values()
    assert len(gatherings) == 1
    gatherings.brought(KEY, peers[2], 2)
    assert len(gatherings) == 0


def test_what_a_follower_would_be_told_does_not_end_a_gathering_of_the_leader() -> None:
    gatherings, peers = gatherings_of(0)
    gathering = gatherings.brought(KEY, peers[1], 1)
    gatherings.told(KEY, {})
    gatherings.told(KEY, {}, CallTimeout("too late"))
    assert not gathering.has_ended


def test_nothing_begins_after_the_end() -> None:
    gatherings, peers = gatherings_of(0)
    gathering = gatherings.brought(KEY, peers[1], 1)
    gatherings.close()
    with pytest.raises(NotInitialized, match="'worker0' has shut down"):
        gathering.values()
    with pytest.raises(NotInitialized, match="'worker0' has shut down"):
        gatherings.brought(KEY, peers[2], 2)
