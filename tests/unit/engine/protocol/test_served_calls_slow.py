"""Slow functions: known by their last run."""

from __future__ import annotations

from torchweft.engine.protocol.calls import _MOST_SLOW, SlowFunctions


def test_a_function_is_slow_by_its_last_run() -> None:
    slow = SlowFunctions()
    slow.note(b"function", was_slow=False)
    assert b"function" in slow
    slow.note(b"function", was_slow=True)
    assert b"function" not in slow
    slow.note(b"function", was_slow=True)


def test_the_number_of_names_is_limited() -> None:
    slow = SlowFunctions()
    for number in range(_MOST_SLOW + 10):
        slow.note(b"function %d" % number, was_slow=False)
    assert len(slow) == _MOST_SLOW
    slow.note(b"function 0", was_slow=True)
    slow.note(b"another", was_slow=False)
    assert b"another" in slow
