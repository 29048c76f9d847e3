from __future__ import annotations

import traceback
import types

import pytest

from torchweft.engine.codec import tracebacks


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


def fails_while_it_handles(own: Exception) -> None:
    try:
        raise own
    except KeyError:
        with pytest.raises(KeyError, match="of a call") as caught:
            {}["of a call"]
        tracebacks.drop_frames(caught.value)
        raise


def test_an_error_that_the_program_is_handling_is_left_as_it_is() -> None:
    own = KeyError("of the program")
    with pytest.raises(KeyError, match="of the program"):
        fails_while_it_handles(own)
    names = [frame.name for frame in traceback.extract_tb(own.__traceback__)]
    assert names[-1] == "fails_while_it_handles"
    assert not hasattr(own, "__notes__")


def test_errors_that_led_to_each_other_come_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    tracebacks.drop_frames(one)


def test_an_error_that_came_on_no_line_of_a_function_stays_itself() -> None:
    """As where a signal handler raises at the begin of a function."""
    code = fail_twice.__code__.replace(co_linetable=b"")
    function = types.FunctionType(code, globals(), "fail_twice")
    with pytest.raises(ValueError, match="kept") as caught:
        function(OSError("hidden"))
    tracebacks.shorten(caught.value)
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert names[-1] == "fail_twice"
