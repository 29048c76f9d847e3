"""Rows of text whose columns are aligned."""

from __future__ import annotations

from torchweft.columns import LAYOUT, aligned, printable


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["name", "count", "why"], ["a", "1", "first"], ["longer", "1000", ""]]
    assert aligned(rows, [True, False, True]) == [
        "name    count  why",
        "a           1  first",
        "longer   1000",
    ]
    assert aligned([["a", "b"]], [True, True], gap=" ") == ["a b"]


def test_characters_that_control_a_terminal_are_escaped() -> None:
    hostile = "a\x1b]0;title\x07b\x9b31m\r\u202ec\u200bd\x00\n\te"
    shown = r"a\x1b]0;title\x07b\x9b31m\r\u202ec\u200bd\x00"
    assert printable(hostile) == shown + r"\n\te"
    assert printable(hostile, LAYOUT) == shown + "\n\te"
    assert printable("größe 漢字") == "größe 漢字"
