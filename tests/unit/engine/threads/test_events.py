from __future__ import annotations

from torchweft.engine.threads.reports import KEPT, Events


def test_only_the_last_events_are_kept() -> None:
    events = Events()
    for number in range(KEPT + 5):
        events.note("event %d", number)
    told = events.all()
    assert len(told) == KEPT
    assert told[-1][1] == f"event {KEPT + 4}"
    assert told == sorted(told)
