from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchweft.mapreduce.notes import with_note


def test_notes_come_one_after_the_other() -> None:
    error: Any = KeyError("missing")
    assert with_note(error, "first") is error
    with_note(error, "second")
    assert error.__notes__ == ["first", "second"]


def test_notes_of_others_stay_theirs() -> None:
    error: Any = KeyError("missing")
    others = error.__notes__ = ["first"]
    with_note(error, "second")
    assert (others, error.__notes__) == (["first"], ["first", "second"])


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_an_error_that_takes_no_attributes_stays_as_it_is() -> None:
    error = Frozen(5)
    assert with_note(error, "first") is error
    assert not hasattr(error, "__notes__")
