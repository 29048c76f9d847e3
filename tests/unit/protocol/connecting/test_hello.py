from __future__ import annotations

import json
from typing import Any

import pytest

from torchweft.errors import ProtocolError
from torchweft.protocol.connecting import Hello, Purpose


@pytest.mark.parametrize(
    "hello",
    [
        Hello(Purpose.LINK, 3),
        Hello(Purpose.LINK, 3, "name", 2),
        Hello(Purpose.RESUME, 3, "name", 4, 1 << 40),
        Hello(Purpose.PROBE, 3, "name", 4),
        Hello(Purpose.DATA, 3, set_number=6),
        Hello(Purpose.INTRODUCTION, 3),
    ],
)
def test_a_greeting_arrives_as_it_was(hello: Hello) -> None:
    assert Hello.from_facts(json.loads(json.dumps(hello.facts()))) == hello


@pytest.mark.parametrize(
    "facts",
    [
        {"purpose": "dinner"},
        {"purpose": None},
        {"purpose": []},
        {"to": "x"},
        {"session": 3, "attempt": 1},
        {"session": "x"},
        {"session": "x", "attempt": True},
        {"purpose": "resume", "session": "x", "attempt": 1},
        {"purpose": "resume", "session": "x", "attempt": 1, "position": -1},
        {"purpose": "resume", "session": "x", "position": 1},
        {"purpose": "data"},
        {"purpose": "data", "set": 1.5},
    ],
)
def test_a_greeting_without_sense_is_an_error(facts: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Hello.from_facts(facts)


def test_a_greeting_that_says_nothing_is_for_a_first_connection() -> None:
    assert Hello.from_facts({"capabilities": {}}) == Hello(Purpose.LINK)
