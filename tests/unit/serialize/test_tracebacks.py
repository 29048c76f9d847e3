from __future__ import annotations

import pytest

from torchweft.serialize import tracebacks


class Frozen(Exception):
    """An error that accepts no attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def fail_twice(first: Exception) -> None:
    try:
        raise first
    except Exception as error:
        try:
            raise KeyError("shown")
        except KeyError as shown:
            shown.__context__ = error
            raise ValueError("kept") from shown


@pytest.mark.parametrize("first", [OSError("hidden"), Frozen("hidden")])
def test_an_error_in_a_future_keeps_no_frame(first: Exception) -> None:
    with pytest.raises(ValueError, match="kept") as caught:
        fail_twice(first)
    error = caught.value
    tracebacks.drop_frames(error)
    shown = error.__cause__
    assert shown is not None
    assert shown.__context__ is first
    assert [each.__traceback__ for each in (error, shown, first)] == [None] * 3
    (note,) = shown.__notes__
    assert note.startswith("Traceback (most recent call last):\n")
    assert "in fail_twice" in note
    assert not hasattr(error, "__notes__")
    tracebacks.drop_frames(error)
    assert len(shown.__notes__) == 1


def test_errors_that_led_to_each_other_come_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    tracebacks.drop_frames(one)
