from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.protocol.connecting import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Answer,
    Busy,
    Connecting,
    Dial,
    Done,
    Failure,
    Hello,
    Lose,
    Patience,
    Purpose,
    State,
    Terms,
    Verdict,
    Wait,
)

ME, LOWER, HIGHER = 5, 3, 7
PATIENCE = Patience(10.0, 20.0)
TIMEOUT_S = 10.0
THEIRS = Hello(Purpose.LINK, ME, "theirs", 1)


def wanting(peer: int = LOWER, deadline_s: float = math.inf) -> Connecting:
    """Returns a machine whose first attempt to dial is under way."""
    machine = Connecting(peer, "other")
    step = machine.want(0.0, deadline_s, TIMEOUT_S, "ours")
    assert step == Dial(Terms("ours", True, 1), min(TIMEOUT_S, deadline_s))
    return machine


def linked(*, was_dialled: bool = True, attempt: int = 1) -> Connecting:
    """Returns a machine with a session."""
    machine = Connecting(LOWER, "other")
    assert not machine.adopt(0.0, Terms("ours", was_dialled, attempt), PATIENCE)
    return machine


# First connections


def test_while_the_other_side_connects_this_one_waits_and_then_dials() -> None:
    machine = Connecting(HIGHER, "other")
    machine.hello(ME, THEIRS)
    assert machine.want(0.0, math.inf, TIMEOUT_S, "ours") == Wait(FIRST_PAUSE_S)
    assert machine.state is State.CROSSING
    assert machine.go_on(5.0) == Wait(5.0 + FIRST_PAUSE_S)
    machine.accept_failed()
    assert isinstance(machine.go_on(5.1), Dial)
    assert machine.state is State.DIALLING


@pytest.mark.parametrize("failure", [Failure.BUSY, Failure.CROSSED])
def test_a_peer_that_lives_is_dialled_until_the_deadline(failure: Failure) -> None:
    machine, now_s, dials = wanting(deadline_s=100.0), 0.0, 1
    step = machine.dial_failed(now_s, failure, "silent")
    while not isinstance(step, Busy):
        if isinstance(step, Dial):
            dials += 1
            step = machine.dial_failed(now_s, failure, "silent")
        else:
            assert isinstance(step, Wait)
            now_s = step.until_s
            step = machine.go_on(now_s)
    assert now_s > 100.0 - LONGEST_PAUSE_S
    assert dials > 50


@pytest.mark.parametrize("has_proxy", [False, True])
def test_a_peer_that_cannot_be_reached_is_given_up(*, has_proxy: bool) -> None:
    """As soon if a proxy accepts each connection and ends it."""
    machine, now_s = wanting(), 0.0
    step = machine.dial_failed(now_s, Failure.BROKEN, "no route")
    pauses = []
    while not isinstance(step, Lose):
        if isinstance(step, Wait):
            pauses.append(step.until_s - now_s)
            now_s = step.until_s
            step = machine.go_on(now_s)
        else:
            if has_proxy:
                machine.reached(now_s)
            step = machine.dial_failed(now_s, Failure.BROKEN, "no route")
    assert TIMEOUT_S - LONGEST_PAUSE_S <= now_s <= TIMEOUT_S
    assert pauses[:2] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S])
    assert max(pauses) <= LONGEST_PAUSE_S + 1e-9


@pytest.mark.parametrize("failure", [Failure.BROKEN, Failure.BUSY])
def test_a_worker_that_was_stopped_tries_before_it_gives_up(failure: Failure) -> None:
    """A stopped worker had no chance to reach the other side."""
    machine = wanting()
    assert isinstance(machine.dial_failed(1.0, failure, "reset"), Wait)
    step = machine.go_on(1000.0)
    assert isinstance(step, Dial)
    assert isinstance(machine.dial_failed(1000.0, Failure.BROKEN, "reset"), Wait)
    assert isinstance(machine.go_on(1000.5), Dial)
    # The worker is stopped again, during an attempt.
    assert isinstance(machine.dial_failed(2000.0, Failure.BROKEN, "reset"), Wait)
    assert isinstance(machine.go_on(2000.2), Dial)
    assert isinstance(machine.dial_failed(2000.2 + TIMEOUT_S, Failure.BROKEN, "reset"), Lose)




# The end


def test_a_loss_happens_once_and_with_its_first_cause() -> None:
    machine = linked()
    assert machine.lose("reset") == "reset"
    assert machine.lose("again") is None
    assert machine.state is State.LOST
    assert machine.cause == "reset"
    assert machine.due_s() == math.inf
    refusal = Answer(Verdict.REFUSE, "this group lost worker 'other' before")
    for purpose in (Purpose.LINK, Purpose.RESUME, Purpose.PROBE, Purpose.DATA):
        assert machine.hello(ME, Hello(purpose, ME, "ours", 9)) == refusal
    assert machine.hello(ME, Hello(Purpose.INTRODUCTION, ME)) == Answer(Verdict.CONFIRM)
    assert not machine.take_attempt(9)
    assert machine.next_attempt() is None
    assert machine.adopt(1.0, None, PATIENCE) == "the peer is lost"
    assert machine.want(1.0, math.inf, TIMEOUT_S, "x") == Done()
    assert machine.redial_failed(1.0, Failure.BROKEN, "late") == []


EVENTS = st.sampled_from(
    ["want", "offer", "busy", "crossed", "broken", "go on", "hello", "fail accept", "adopt ours",
     "adopt theirs", "break", "step", "redial", "resumed", "probe", "stop", "lose", "goodbye"]
)  # fmt: skip


@settings(max_examples=examples(300))
@given(peer=st.sampled_from([LOWER, HIGHER]), events=st.lists(EVENTS, max_size=40))
def test_whatever_happens_there_is_one_connection_and_one_loss(
    peer: int, events: list[str]
) -> None:
    machine, now_s, adopted, losses, is_offered = Connecting(peer, "other"), 0.0, 0, 0, False
    for number, event in enumerate(events):
        now_s += 0.1
        before = machine.state
        if event == "want":
            machine.want(now_s, now_s + 1.0, TIMEOUT_S, f"name {number}")
        elif event == "offer":
            is_offered |= machine.offer()
        elif event in ("busy", "crossed", "broken"):
            machine.dial_failed(now_s, Failure[event.upper()], event)
        elif event == "go on":
            machine.go_on(now_s)
        elif event == "hello":
            verdict = machine.hello(ME, THEIRS).verdict
            if is_offered and peer == LOWER:
                assert verdict is not Verdict.ACCEPT, "its own offer may have been accepted"
            if before in (State.LOST, State.LINKED):
                assert verdict is not Verdict.ACCEPT
        elif event == "fail accept":
            machine.accept_failed()
        elif event.startswith("adopt"):
            terms = Terms(event[6:], event == "adopt ours", 1)
            adopted += not machine.adopt(now_s, terms, PATIENCE)
        elif event == "break":
            machine.broke(now_s, "reset", is_answer=True)
        elif event == "step":
            machine.step(now_s)
        elif event == "redial":
            machine.redial(now_s, TIMEOUT_S)
        elif event == "resumed":
            machine.resumed(now_s)
        elif event == "probe":
            machine.hello(ME, Hello(Purpose.PROBE, ME, "ours", 1))
        elif event == "stop":
            machine.want_no_more()
        elif event == "goodbye":
            machine.goodbye(b"")
        else:
            losses += machine.lose("killed") is not None
        assert adopted <= 1
        assert losses <= 1
        if before is State.LOST:
            assert machine.state is State.LOST
