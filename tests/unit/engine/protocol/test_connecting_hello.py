from __future__ import annotations

from typing import Any

import pytest

from tests.tables import cases
from torchweft.engine.protocol.connecting import Hello, Purpose, Verdict
from torchweft.errors import ProtocolError


@cases(
    "facts",
    [
        {"purpose": "dinner"},
        {"purpose": None},
        {"purpose": []},
        {"to": "x"},
        {"session": 3, "attempt": 1},
        {"session": "x", "attempt": True},
        {"purpose": "resume", "session": "x", "attempt": 1, "position": -1},
        {"purpose": "data", "set_number": 1.5},
        {"purpose": "observe", "question": []},
    ],
)
def test_a_greeting_without_sense_is_an_error(facts: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Hello.from_facts(facts)


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("session", [None, "name"])
@pytest.mark.parametrize("is_unix", [True, False])
def test_a_greeting_that_came_to_the_wrong_place(
    purpose: Purpose, session: str | None, is_unix: bool
) -> None:
    for_another = Hello(purpose, 3, session).stray_answer(4, is_unix=is_unix)
    assert for_another is not None
    assert for_another.verdict is Verdict.REFUSE
    assert for_another.text == "the worker that was here is gone"
    for to in (None, 4):
        answer = Hello(purpose, to, session).stray_answer(4, is_unix=is_unix)
        if purpose is Purpose.LINK and is_unix == (session is not None):
            assert answer is not None
            assert answer.verdict is Verdict.HANG_UP
        else:
            assert answer is None
