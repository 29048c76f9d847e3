from __future__ import annotations

import pytest

from torchweft.engine.protocol.registration import ENDED_LIMIT, Registration
from torchweft.engine.worker.peers import Members
from torchweft.errors import (
    DuplicateName,
    ProtocolError,
    UnknownWorker,
    WorkerLost,
)
from torchweft.ids import WorkerInfo


def registration(name: str, worker: int, rank: int | None = None) -> Registration:
    return Registration(name, worker, ("unix:@x",), main="train", later_rank=rank)


def members(*, is_open: bool = True) -> Members:
    return Members(registration("a", 0), [registration("b", 1)], is_open=is_open)


def names(group: Members) -> list[str]:
    return [peer.name for peer in group.present()]


@pytest.mark.parametrize(("name", "rank"), [("b", 1), ("b", 7), ("c", 1)])
def test_a_later_life_takes_the_place_of_a_former(name: str, rank: int) -> None:
    group = members()
    before = group.find("b")
    peer, former = group.join(registration(name, 16384, rank))
    assert former == (before,)
    assert group.find(name) is group.find(rank) is group.by_id[16384] is peer
    assert group.by_id[1] is before
    assert names(group) == ["a", name]


@pytest.mark.parametrize(("name", "rank"), [("d", 3), ("c", 7), ("e", 2)])
def test_what_was_read_of_a_former_life_does_not_replace_a_later_one(name: str, rank: int) -> None:
    group = members()
    later, _ = group.join(registration("c", 16384, 3))
    other, _ = group.join(registration("e", 16385, 7), is_introduced=False)
    is_over = name == "c" or rank == 3
    if is_over:
        with pytest.raises(DuplicateName, match="has joined since"):
            group.join(registration(name, 16, rank), is_introduced=False)
        assert group.find("c") is later
    else:
        peer, former = group.join(registration(name, 16, rank), is_introduced=False)
        assert former == (other,)
        assert group.find("e") is peer


def test_a_closed_group_takes_nobody_in() -> None:
    group = members(is_open=False)
    with pytest.raises(ProtocolError, match="no worker of id 2"):
        group.join(registration("c", 2))
    assert group.join(registration("b", 1)) == (group.find("b"), ())


def test_an_info_of_a_worker_that_leaves_or_has_left_says_so() -> None:
    group = members()
    peer = group.find("b")
    peer.depart()
    group.retire(peer)
    with pytest.raises(WorkerLost, match=r"'b' \(rank 1\) is leaving the group") as caught:
        group.find(peer.info)
    assert caught.value.worker == "b"
    peer.declare_lost("end of file")
    with pytest.raises(WorkerLost, match=r"'b' \(rank 1\) has left the group"):
        group.find(peer.info)
    later, _ = group.join(registration("b", 16384, 1))
    assert group.find(peer.info) is later
    with pytest.raises(UnknownWorker):
        group.find(WorkerInfo("b", 7))


def test_of_lives_that_are_over_the_latest_are_remembered_in_full() -> None:
    group = members()
    for worker in range(2, 2 * ENDED_LIMIT):
        peer, _ = group.join(registration("guest", worker, rank=7))
        assert group.find("guest") is peer
        peer.depart()
        peer.declare_lost("")
        group.retire(peer)
    assert len(group.by_id) <= ENDED_LIMIT + 2
    assert group.find("b").lost is None
    # A message may still name an early one, and an early one may still try to come back.
    assert 5 not in group.by_id
    assert group.by_id[5].lost is not None
    stale, former = group.join(registration("b", 6, rank=1))
    assert stale.lost is not None
    assert former == ()
    assert group.find("b").id == 1
    for worker in range(2, 2 * ENDED_LIMIT):
        assert group.by_id[worker].lost is not None
    assert len(group.by_id) <= ENDED_LIMIT + 2


def test_a_replaced_life_that_is_never_lost_keeps_no_other_from_being_forgotten() -> None:
    group = members()
    first, _ = group.join(registration("guest", 2, rank=7))
    for worker in range(3, 2 * ENDED_LIMIT):
        peer, _ = group.join(registration("guest", worker, rank=7))
        peer.declare_lost("it has crashed")
    assert group.by_id[2] is first
    assert len(group.by_id) <= ENDED_LIMIT + 4
    # Once it is over, it is forgotten in its turn.
    first.declare_lost("it has crashed too")
    for worker in range(2 * ENDED_LIMIT, 4 * ENDED_LIMIT):
        group.join(registration("guest", worker, rank=7))[0].declare_lost("it has crashed")
    assert 2 not in group.by_id
    assert len(group.by_id) <= ENDED_LIMIT + 3
