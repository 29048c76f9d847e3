from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.protocol.sessions import (
    Contact,
    ContactStep,
)

DETECTION_S, RECONNECT_S = 10.0, 20.0


@pytest.fixture
def contact() -> Contact:
    return Contact(0.0, DETECTION_S, RECONNECT_S)


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
