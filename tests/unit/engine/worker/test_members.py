from __future__ import annotations

import pytest

from torchweft.engine.protocol.registration import ENDED_LIMIT, Registration
from torchweft.engine.worker.peers import Members, Peer
from torchweft.errors import (
    ArgumentTypeError,
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


@pytest.mark.parametrize("to", ["b", 1, WorkerInfo("b", 1)])
def test_a_worker_is_found(to: str | int | WorkerInfo) -> None:
    group = members()
    assert group.find(to) is group.by_id[1]


@pytest.mark.parametrize("to", ["c", "", 2, -1, WorkerInfo("b", 2), WorkerInfo("c", 1)])
def test_nobody_is_found(to: object) -> None:
    with pytest.raises(UnknownWorker, match=r"the group has 'a' \(0\), 'b' \(1\)"):
        members().find(to)  # type: ignore[arg-type]


def test_a_name_that_is_almost_one_is_answered_with_that() -> None:
    group = Members(registration("trainer0", 0), [registration("trainer1", 1)], is_open=False)
    for to in ("trianer1", "trainer_1", WorkerInfo("trainer11", 1)):
        with pytest.raises(UnknownWorker, match="no such worker; did you mean 'trainer1'"):
            group.find(to)
    with pytest.raises(UnknownWorker, match="no such worker; the group has"):
        group.find("parameter_server")


@pytest.mark.parametrize("to", [0.5, None, ["b"], b"b"])
def test_what_can_name_no_worker_is_of_a_wrong_type(to: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"to is .*; pass the name of a worker"):
        members().find(to)  # type: ignore[arg-type]


def test_only_those_with_the_same_main_program_know_its_functions_by_name() -> None:
    group = Members(
        registration("a", 0),
        [registration("b", 1), Registration("c", 2, ()), Registration("d", 3, (), main="other")],
        is_open=False,
    )
    assert [group.find(name).main_by_name for name in "abcd"] == [True, True, False, False]


def test_who_joins_is_told_of_and_found() -> None:
    group = members()
    told: list[Peer] = []
    group.on_joined(told.append)
    assert [peer.name for peer in told] == ["a", "b"]
    peer, former = group.join(registration("c", 2))
    assert former == ()
    assert told[2] is peer is group.find("c") is group.find(2) is group.by_id[2]
    assert group.join(registration("c", 2)) == (peer, ())
    assert len(told) == 3


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


@pytest.mark.parametrize(("name", "rank"), [("a", 7), ("c", 0)])
def test_nobody_takes_the_place_of_this_worker(name: str, rank: int) -> None:
    group = members()
    with pytest.raises(DuplicateName, match=r"'a' \(rank 0\) lives"):
        group.join(registration(name, 16384, rank))
    assert names(group) == ["a", "b"]


def test_a_closed_group_takes_nobody_in() -> None:
    group = members(is_open=False)
    with pytest.raises(ProtocolError, match="no worker of id 2"):
        group.join(registration("c", 2))
    assert group.join(registration("b", 1)) == (group.find("b"), ())


@pytest.mark.parametrize("is_open", [True, False])
def test_who_is_lost_is_found_but_of_an_open_group_no_member(is_open: bool) -> None:
    group = members(is_open=is_open)
    peer = group.find("b")
    peer.declare_lost("end of file")
    assert group.find("b") is peer
    assert names(group) == (["a"] if is_open else ["a", "b"])


def test_who_has_left_is_not_found() -> None:
    group = members()
    peer = group.find("b")
    group.retire(peer)
    group.retire(peer)
    with pytest.raises(UnknownWorker, match=r"the group has 'a' \(0\); it is open"):
        group.find("b")
    assert group.by_id[1] is peer


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


def test_a_former_life_that_retires_late_leaves_the_later_one_alone() -> None:
    group = members()
    former = group.find("b")
    peer, _ = group.join(registration("b", 16384, 1))
    group.retire(former)
    assert group.find("b") is group.find(1) is peer


def test_one_that_left_before_this_one_came_is_lost() -> None:
    group = members()
    told: list[Peer] = []
    group.on_joined(told.append)
    peer = group.departed(5)
    assert peer is group.departed(5) is told[2]
    assert "has left the group" in str(peer.lost)
    assert names(group) == ["a", "b"]


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


def test_lost_lives_count_with_their_names_and_without() -> None:
    group = members()
    for worker in range(2, 3 * ENDED_LIMIT):
        # Two of three take the name and rank of an earlier one.
        name, rank = (f"guest{worker}", worker) if worker % 3 == 0 else ("guest", 1 << 20)
        peer, _ = group.join(registration(name, worker, rank=rank))
        peer.declare_lost("it has crashed")
        group.lose(peer)
    assert len(group.by_id) <= ENDED_LIMIT + 2
    assert len(group.known()) <= ENDED_LIMIT // 3 + 4
    latest = 3 * ENDED_LIMIT - 3
    assert group.find(f"guest{latest}").lost is not None
    with pytest.raises(UnknownWorker):
        group.find("guest3")
    assert "number-3" in str(group.by_id[3].lost)


def test_a_life_that_was_replaced_and_is_not_over_is_not_forgotten() -> None:
    group = members()
    first, _ = group.join(registration("guest", 2, rank=7))
    for worker in range(3, 2 * ENDED_LIMIT):
        group.join(registration("guest", worker, rank=7))
    assert group.by_id[2] is first


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
