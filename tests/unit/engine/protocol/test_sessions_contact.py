from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.protocol.sessions import (
    FIRST_PAUSE_S,
    Contact,
    ContactStep,
)

DETECTION_S, RECONNECT_S = 10.0, 20.0


@pytest.fixture
def contact() -> Contact:
    return Contact(0.0, DETECTION_S, RECONNECT_S)


def next_dial_s(contact: Contact, now_s: float) -> float:
    """Steps the contact whenever it is due until it asks to dial; returns that time."""
    while (step := contact.step(now_s)) is not ContactStep.DIAL:
        assert step is ContactStep.NOTHING
        assert contact.due_s() > now_s
        now_s = contact.due_s()
    return now_s


def test_a_silent_peer_whose_system_accepts_a_connection_is_not_given_up(contact: Contact) -> None:
    assert contact.step(5.0) is ContactStep.DIAL
    for now_s in (6.0, 7.0, 8.0, 9.0):
        assert contact.step(now_s) is ContactStep.NOTHING
    contact.reached(9.9)
    assert contact.step(10.0) is ContactStep.NOTHING, "the greeting is under way"
    contact.dial_failed(10.1, "reset")
    assert contact.step(10.1 + FIRST_PAUSE_S) is ContactStep.DIAL, "the old connection is suspect"
    now_s = 11.0
    contact.dial_failed(now_s, "no answer")
    while (step := contact.step(now_s)) is not ContactStep.GIVE_UP:
        if step is ContactStep.DIAL:
            contact.dial_failed(now_s, "no answer")
        now_s = contact.due_s()
    assert now_s == 9.9 + DETECTION_S


def test_silence_is_tried_to_be_broken_and_then_the_end(contact: Contact) -> None:
    assert contact.step(4.99) is ContactStep.NOTHING
    assert contact.step(5.0) is ContactStep.DIAL
    assert contact.step(6.0) is ContactStep.NOTHING, "one attempt at a time"
    assert not contact.is_broken
    contact.dial_failed(7.0, "no answer")
    assert contact.step(7.0) is ContactStep.NOTHING
    assert contact.due_s() == 7.0 + FIRST_PAUSE_S
    assert contact.step(contact.due_s()) is ContactStep.DIAL
    assert contact.step(8.0) is ContactStep.NOTHING
    contact.dial_failed(9.0, "no answer")
    assert contact.step(9.99) is ContactStep.DIAL
    assert contact.step(10.0) is ContactStep.GIVE_UP
    assert contact.cause == "nothing was heard of it for 10.0 s"
    assert contact.step(11.0) is ContactStep.NOTHING
    assert contact.due_s() == math.inf


def test_who_listens_and_does_not_speak_is_waited_for(contact: Contact) -> None:
    now_s = 0.0
    contact.broke(now_s, "reset", is_answer=True)
    for _ in range(100):
        now_s = next_dial_s(contact, now_s) + 1.0
        assert contact.step(now_s) is ContactStep.NOTHING
        contact.dial_failed(now_s, "the greeting took too long", is_there=True)
    assert now_s > 5 * RECONNECT_S
    limit_s = now_s + RECONNECT_S
    while contact.step(now_s) is not ContactStep.GIVE_UP:
        contact.dial_failed(now_s, "unreachable")
        now_s = contact.due_s()
    assert now_s == limit_s
    assert contact.cause.endswith("unreachable")


def test_who_was_stopped_in_a_silence_tries_before_it_gives_up(contact: Contact) -> None:
    assert contact.step(1.0) is ContactStep.NOTHING
    assert contact.step(1000.0) is ContactStep.DIAL
    assert contact.step(1001.0) is ContactStep.NOTHING
    assert contact.step(1002.0) is ContactStep.NOTHING
    # The process is stopped again, during the attempt.
    assert contact.step(2000.0) is ContactStep.NOTHING
    contact.dial_failed(2000.0, "no answer")
    assert contact.step(2000.5) is ContactStep.DIAL
    contact.resumed(2000.6)
    assert contact.step(2000.7) is ContactStep.NOTHING
    assert contact.cause == ""


EVENTS = ("heard", "broke", "silent break", "failed", "there", "dialled", "resumed", "wait")


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 3.0)), max_size=60))
def test_whatever_happens_it_dials_one_at_a_time_and_is_due_when_it_says(
    events: list[tuple[str, float]],
) -> None:
    contact, now_s, is_dialling = Contact(0.0, DETECTION_S, RECONNECT_S), 0.0, False
    for event, pause_s in events:
        # The contact has nothing to do before it is due.
        if contact.due_s() > now_s:
            early_s = min(now_s + pause_s, math.nextafter(contact.due_s(), 0.0))
            assert contact.step(early_s) is ContactStep.NOTHING
            now_s = early_s
        now_s += pause_s
        step = contact.step(now_s)
        if step is ContactStep.GIVE_UP:
            assert contact.cause
            assert contact.silence_s(now_s) >= DETECTION_S or contact.is_broken
            assert contact.step(now_s + 1000.0) is ContactStep.NOTHING
            return
        assert not (step is ContactStep.DIAL and is_dialling)
        is_dialling |= step is ContactStep.DIAL
        if event == "heard" and not contact.is_broken:
            contact.heard(now_s)
        elif event.endswith("broke") or event == "silent break":
            contact.broke(now_s, "x", is_answer=event == "broke")
        elif is_dialling and event in ("failed", "there"):
            contact.dial_failed(now_s, "x", is_there=event == "there")
            is_dialling = False
        elif is_dialling and event == "dialled":
            contact.dialled(now_s)
            is_dialling = False
        elif event == "resumed":
            contact.resumed(now_s)
            is_dialling = False


@settings(max_examples=examples(100))
@given(st.booleans(), st.floats(0.0, 2.0), st.floats(1.0, 30.0), st.floats(0.0, 30.0))
def test_contact_is_given_up_in_time_and_not_before(
    is_broken: bool, dial_takes_s: float, detection_s: float, reconnect_s: float
) -> None:
    contact, now_s = Contact(0.0, detection_s, reconnect_s), 0.0
    limit_s = reconnect_s if is_broken else detection_s
    if is_broken:
        contact.broke(0.0, "reset", is_answer=True)
    while (step := contact.step(now_s)) is not ContactStep.GIVE_UP:
        if step is ContactStep.DIAL:
            failed_s = now_s + dial_takes_s
            while contact.due_s() < failed_s:
                assert contact.due_s() > now_s, "it would be asked all the time"
                now_s = contact.due_s()
                if contact.step(now_s) is ContactStep.GIVE_UP:
                    assert limit_s <= now_s + 1e-6
                    return
            now_s = failed_s
            contact.dial_failed(now_s, "unreachable")
        now_s = max(now_s, contact.due_s())
    assert limit_s - 1e-6 <= now_s <= limit_s + dial_takes_s + 1e-6


def test_a_process_that_was_stopped_has_time_though_its_system_heard_something_meanwhile() -> None:
    contact = Contact(0.0, 1.0, 15.0)
    contact.heard(0.4)
    assert contact.step(0.4) is ContactStep.NOTHING
    # The process is stopped until 4.0; its kernel received data until 2.6.
    contact.heard(2.6)
    assert contact.step(4.0) is ContactStep.DIAL
    contact.resumed(4.2)
    assert contact.step(4.2) is ContactStep.NOTHING
    assert not contact.cause
