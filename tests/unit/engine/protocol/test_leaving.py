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
    Report,
    Send,
    Stage,
    Step,
)
from torchweft.errors import ProtocolError

IDLE = Report(is_idle=True, activity=7)
BUSY = Report(is_idle=False, activity=7)


def observe(machine: OpenLeaving | ClosedLeaving, *, is_idle: bool, is_settled: bool) -> object:
    return machine.observed(IDLE if is_idle else BUSY, is_settled=is_settled)


# Open groups


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


def test_without_its_leader_a_worker_goes_at_once() -> None:
    machine = ClosedLeaving()
    assert machine.member_lost(2) == []
    assert machine.member_lost(0) == [Left((0,))]
    assert machine.begin() == []


def settling(machine: ClosedLeaving) -> ClosedLeaving:
    machine.begin()
    machine.received(0, Step.SETTLE, [])
    return machine


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
