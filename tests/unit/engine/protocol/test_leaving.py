from __future__ import annotations

import pytest

from torchweft.engine.protocol.leaving import (
    BeginSettling,
    ClosedLeaving,
    ExpectEnds,
    Leader,
    Left,
    Look,
    Lose,
    Missing,
    OpenLeaving,
    ProbeLater,
    Report,
    Retire,
    Send,
    Stage,
    Step,
    Watch,
)
from torchweft.errors import ProtocolError

IDLE = Report(is_idle=True, activity=7)
BUSY = Report(is_idle=False, activity=7)


def observe(machine: OpenLeaving | ClosedLeaving, *, is_idle: bool, is_settled: bool) -> object:
    return machine.observed(IDLE if is_idle else BUSY, is_settled=is_settled)


# Open groups


def leaving(*members: int) -> OpenLeaving:
    """Returns the machine of a worker that has told these members that it leaves."""
    machine = OpenLeaving()
    assert machine.begin() == []
    for member in members:
        assert machine.member_present(member) == [Send(member, Step.LEAVING)]
    return machine


def test_a_departure_goes_through_its_stages() -> None:
    machine = leaving(1, 2)
    assert not machine.is_watched
    assert observe(machine, is_idle=True, is_settled=True) == []
    assert machine.missing() == Missing("had not answered", (1, 2))
    assert machine.received(1, Step.NOTED, []) == []
    assert observe(machine, is_idle=True, is_settled=True) == []
    machine.received(2, Step.NOTED, [])
    assert machine.is_watched
    assert observe(machine, is_idle=False, is_settled=True) == []
    assert machine.stage is Stage.SERVING
    assert machine.missing() == Missing("had calls under way", ())
    assert observe(machine, is_idle=True, is_settled=True) == [BeginSettling()]
    assert observe(machine, is_idle=True, is_settled=False) == []
    assert machine.missing() == Missing("had not let go of all references", ())
    assert observe(machine, is_idle=True, is_settled=True) == [Left()]
    assert machine.stage is Stage.LEFT
    assert not machine.is_watched
    assert observe(machine, is_idle=True, is_settled=True) == []


def test_a_member_that_is_told_once_is_not_told_again() -> None:
    assert leaving(1).member_present(1) == []


def test_two_that_leave_wait_for_each_others_answers() -> None:
    """The other worker still serves, and may call this one on behalf of its callers."""
    machine = leaving(1)
    assert machine.received(1, Step.LEAVING, []) == [Retire(1), Send(1, Step.NOTED)]
    assert machine.missing().workers == (1,)


def test_a_member_that_said_that_it_leaves_is_told_as_well() -> None:
    machine = OpenLeaving()
    machine.received(1, Step.LEAVING, [])
    machine.begin()
    assert machine.member_present(1) == [Send(1, Step.LEAVING)]


def test_after_the_end_nobody_is_told() -> None:
    machine = leaving()
    observe(machine, is_idle=True, is_settled=True)
    observe(machine, is_idle=True, is_settled=True)
    assert machine.stage is Stage.LEFT
    assert machine.member_present(1) == []


@pytest.mark.parametrize("step", [0, Step.READY, Step.CLOSE, 99])
def test_steps_of_closed_groups_are_refused(step: int) -> None:
    with pytest.raises(ProtocolError, match="closed groups"):
        OpenLeaving().received(1, step, [])


# Closed groups


def test_a_worker_of_a_closed_group_goes_when_the_leader_says_so() -> None:
    machine = ClosedLeaving()
    assert machine.begin() == [Send(0, Step.READY)]
    assert machine.missing() == Missing("had not said that all are done", (0,))
    assert machine.received(0, Step.PROBE, [3]) == [Look()]
    assert observe(machine, is_idle=False, is_settled=False) == [Send(0, Step.REPORT, (3, 0, 7))]
    assert observe(machine, is_idle=True, is_settled=False) == []
    assert machine.received(0, Step.SETTLE, []) == [ExpectEnds(), BeginSettling()]
    assert machine.is_watched
    assert observe(machine, is_idle=True, is_settled=False) == []
    assert observe(machine, is_idle=True, is_settled=True) == [Send(0, Step.SETTLED)]
    assert not machine.is_watched
    assert machine.stage is Stage.SETTLED
    assert machine.received(0, Step.CLOSE, [2]) == [Left((2,))]
    assert machine.received(0, Step.CLOSE, [2]) == []
    assert machine.stage is Stage.LEFT


def test_the_leader_goes_when_it_has_told_all() -> None:
    machine = Leader({0, 1})
    assert machine.begin() == [Send(0, Step.READY), Watch()]
    assert machine.received(0, Step.READY, []) == []
    assert machine.missing() == Missing("had not called shutdown", (1,))
    probes = machine.received(1, Step.READY, [])
    for probe_round in (1, 2):
        assert probes == [Send(worker, Step.PROBE, (probe_round,)) for worker in (0, 1)]
        assert machine.received(0, Step.REPORT, [probe_round, 1, 7]) == []
        actions = machine.received(1, Step.REPORT, [probe_round, 1, 7])
        assert actions == ([ProbeLater()] if probe_round == 1 else settle())
        probes = machine.probe_again()
    assert machine.received(0, Step.SETTLE, []) == [ExpectEnds(), BeginSettling()]
    assert machine.received(1, Step.SETTLED, []) == []
    closing = machine.received(0, Step.SETTLED, [])
    assert closing == [Send(0, Step.CLOSE), Send(1, Step.CLOSE), Left()]
    assert machine.received(0, Step.CLOSE, []) == []


def settle() -> list[Send]:
    return [Send(worker, Step.SETTLE) for worker in (0, 1)]


def test_without_its_leader_a_worker_goes_at_once() -> None:
    machine = ClosedLeaving()
    assert machine.member_lost(2) == []
    assert machine.member_lost(0) == [Left((0,))]
    assert machine.begin() == []


def settling(machine: ClosedLeaving) -> ClosedLeaving:
    machine.begin()
    machine.received(0, Step.SETTLE, [])
    return machine


def test_a_connection_that_ends_before_this_worker_has_settled_is_a_loss() -> None:
    machine = settling(ClosedLeaving())
    assert machine.connection_ended(2) == [Lose(2)]
    assert machine.connection_ended(0) == [Lose(0), Left((0,))]


def test_a_connection_that_ends_when_all_are_let_go_is_none() -> None:
    machine = settling(ClosedLeaving())
    observe(machine, is_idle=True, is_settled=True)
    assert machine.connection_ended(2) == []
    machine.received(0, Step.CLOSE, [])
    assert machine.connection_ended(0) == []


def test_a_leader_whose_connection_ends_before_it_let_go_is_lost() -> None:
    machine = settling(ClosedLeaving())
    observe(machine, is_idle=True, is_settled=True)
    assert machine.connection_ended(0) == [Lose(0), Left((0,))]


def test_the_leader_goes_on_without_one_whose_connection_ended() -> None:
    machine = Leader({0, 1, 2})
    settling(machine)
    observe(machine, is_idle=True, is_settled=True)
    assert machine.connection_ended(2) == [Lose(2)]
    assert machine.lost == {2}


@pytest.mark.parametrize(
    ("me", "step", "arguments", "told"),
    [
        (1, Step.READY, [], "for rank 0 only"),
        (1, Step.REPORT, [1, 1, 1], "for rank 0 only"),
        (1, Step.SETTLED, [], "for rank 0 only"),
        (0, Step.REPORT, [1, 1], "no shutdown message has step 3"),
        (1, Step.PROBE, [1], "step 2, which rank 0 alone sends"),
        (0, Step.CLOSE, [], "step 6, which rank 0 alone sends"),
        (0, Step.LEAVING, [], "no shutdown message has step 7"),
        (1, 99, [], "no shutdown message has step 99"),
    ],
)
def test_steps_that_make_no_sense_are_refused(
    me: int, step: int, arguments: list[int], told: str
) -> None:
    with pytest.raises(ProtocolError, match=told):
        (ClosedLeaving() if me else Leader({0, 1})).received(1, step, arguments)
