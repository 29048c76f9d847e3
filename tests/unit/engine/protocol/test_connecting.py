from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.protocol.connecting import (
    Answer,
    Connecting,
    Done,
    Failure,
    Hello,
    Patience,
    Purpose,
    State,
    Terms,
    Verdict,
)

ME, LOWER, HIGHER = 5, 3, 7
PATIENCE = Patience(10.0, 20.0)
TIMEOUT_S = 10.0
THEIRS = Hello(Purpose.LINK, ME, "theirs", 1)


def linked(*, was_dialled: bool = True, attempt: int = 1) -> Connecting:
    """Returns a machine with a session."""
    machine = Connecting(LOWER, "other")
    assert not machine.adopt(0.0, Terms("ours", was_dialled, attempt), PATIENCE)
    return machine


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
