from __future__ import annotations

import pytest

from torchweft.errors import ProtocolError
from torchweft.protocol.departure import BeginSettling, Departure, Left, Retire, Stage
from torchweft.protocol.shutdown import Send, Step


def leaving(*members: int) -> Departure:
    """Returns the machine of a worker that has told these members that it leaves."""
    departure = Departure()
    departure.begin()
    for member in members:
        assert departure.member_present(member) == [Send(member, Step.LEAVING)]
    return departure


def test_a_departure_goes_through_its_stages() -> None:
    departure = leaving(1, 2)
    assert departure.observed(is_idle=True, is_settled=True) == []
    assert departure.unanswered == (1, 2)
    assert departure.received(1, Step.NOTED) == []
    assert departure.observed(is_idle=True, is_settled=True) == []
    departure.received(2, Step.NOTED)
    assert departure.observed(is_idle=False, is_settled=True) == []
    assert departure.stage is Stage.FINISHING
    assert departure.observed(is_idle=True, is_settled=True) == [BeginSettling()]
    assert departure.observed(is_idle=True, is_settled=False) == []
    assert departure.observed(is_idle=True, is_settled=True) == [Left()]
    assert departure.stage is Stage.LEFT
    assert departure.observed(is_idle=True, is_settled=True) == []


def test_a_member_hears_of_departures_and_stays() -> None:
    departure = Departure()
    assert departure.member_present(1) == []
    assert departure.received(1, Step.LEAVING) == [Retire(1), Send(1, Step.NOTED)]
    assert departure.observed(is_idle=True, is_settled=True) == []
    assert departure.stage is Stage.MEMBER


def test_a_member_that_is_told_once_is_not_told_again() -> None:
    departure = leaving(1)
    assert departure.member_present(1) == []


@pytest.mark.parametrize("stage", [Stage.ANNOUNCING, Stage.FINISHING, Stage.SETTLING])
def test_a_member_that_joins_meanwhile_must_answer(stage: Stage) -> None:
    departure = leaving()
    while departure.stage is not stage:
        is_idle = stage is Stage.SETTLING
        departure.observed(is_idle=is_idle, is_settled=False)
    assert departure.member_present(3) == [Send(3, Step.LEAVING)]
    for _ in range(3):
        assert departure.observed(is_idle=True, is_settled=True) == []
    departure.received(3, Step.NOTED)
    assert departure.observed(is_idle=True, is_settled=True)


def test_calls_of_one_that_joined_meanwhile_are_served() -> None:
    departure = leaving()
    departure.observed(is_idle=True, is_settled=False)
    departure.member_present(3)
    departure.received(3, Step.NOTED)
    assert departure.observed(is_idle=False, is_settled=True) == []
    assert departure.observed(is_idle=True, is_settled=True) == [Left()]


def test_two_that_leave_wait_for_each_others_answers() -> None:
    """The other one still serves, and may make calls to this one for those whom it serves."""
    departure = leaving(1)
    assert departure.received(1, Step.LEAVING) == [Retire(1), Send(1, Step.NOTED)]
    assert departure.unanswered == (1,)


def test_a_member_that_said_that_it_leaves_is_told_as_well() -> None:
    departure = Departure()
    departure.received(1, Step.LEAVING)
    departure.begin()
    assert departure.member_present(1) == [Send(1, Step.LEAVING)]


def test_a_lost_member_need_not_answer() -> None:
    departure = leaving(1)
    departure.member_lost(1)
    assert departure.observed(is_idle=True, is_settled=False) == [BeginSettling()]


def test_after_the_end_nobody_is_told() -> None:
    departure = leaving()
    departure.observed(is_idle=True, is_settled=True)
    departure.observed(is_idle=True, is_settled=True)
    assert departure.stage is Stage.LEFT
    assert departure.member_present(1) == []


@pytest.mark.parametrize("step", [0, Step.READY, Step.CLOSE, 99])
def test_steps_of_closed_groups_are_refused(step: int) -> None:
    with pytest.raises(ProtocolError, match="closed groups"):
        Departure().received(1, step)
