from __future__ import annotations

import math

import pytest

from torchweft.protocol.connecting import Busy, Failure, Lose, Step, Wait
from torchweft.protocol.connecting.first_dial import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SCATTER,
    FirstDial,
)

LIMIT_S = 10.0


def fail_for(tries: FirstDial, failure: Failure, span_s: float) -> tuple[Step, float]:
    """Makes every attempt fail at once; returns the first step that is no pause, and when."""
    now_s = 0.0
    while True:
        tries.limit_s(now_s)
        step = tries.failed(now_s, failure, "why")
        if not isinstance(step, Wait) or now_s > span_s:
            return step, now_s
        now_s = step.until_s
        assert tries.go_on(now_s, is_accepting=False) is None


@pytest.mark.parametrize("failure", [Failure.BUSY, Failure.TURNED_OUT])
def test_a_peer_whose_system_accepts_connections_is_dialled_until_the_deadline(
    failure: Failure,
) -> None:
    deadline_s = 5 * LIMIT_S
    step, at_s = fail_for(FirstDial(0.0, deadline_s, LIMIT_S), failure, math.inf)
    assert step == Busy("why")
    assert deadline_s - LONGEST_PAUSE_S <= at_s < deadline_s


def test_a_peer_that_the_network_does_not_reach_is_given_up() -> None:
    step, at_s = fail_for(FirstDial(0.0, math.inf, LIMIT_S), Failure.BROKEN, 2 * LIMIT_S)
    assert step == Lose("why", Failure.BROKEN)
    assert LIMIT_S - LONGEST_PAUSE_S <= at_s <= LIMIT_S


@pytest.mark.parametrize("failure", [Failure.REFUSED, Failure.GONE])
def test_a_no_is_final(failure: Failure) -> None:
    assert FirstDial(0.0, math.inf, LIMIT_S).failed(0.0, failure, "no") == Lose("no", failure)


def test_being_turned_out_once_restarts_the_limit_of_an_unreachable_peer() -> None:
    tries = FirstDial(0.0, math.inf, LIMIT_S)
    tries.limit_s(0.0)
    assert isinstance(tries.failed(0.9 * LIMIT_S, Failure.TURNED_OUT, "why"), Wait)
    tries.limit_s(LIMIT_S)
    assert isinstance(tries.failed(1.8 * LIMIT_S, Failure.BROKEN, "why"), Wait)


@pytest.mark.parametrize("chance", [0.0, 0.4, 1.0])
def test_pauses_grow_and_are_partly_random(chance: float) -> None:
    tries = FirstDial(0.0, math.inf, LIMIT_S, lambda: chance)
    pauses_s = []
    for _ in range(8):
        step = tries.failed(0.0, Failure.TURNED_OUT, "why")
        assert isinstance(step, Wait)
        pauses_s.append(step.until_s)
    expected_s = [min(FIRST_PAUSE_S * 2**count, LONGEST_PAUSE_S) for count in range(8)]
    assert pauses_s == pytest.approx([(1 + SCATTER * chance) * pause_s for pause_s in expected_s])


def test_an_attempt_ends_with_the_caller() -> None:
    tries = FirstDial(0.0, 1.5 * LIMIT_S, LIMIT_S)
    assert tries.limit_s(0.0) == LIMIT_S
    assert tries.limit_s(LIMIT_S) == 1.5 * LIMIT_S
