"""Rows of text whose columns are aligned."""

from __future__ import annotations

from torchweft.columns import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["name", "count", "why"], ["a", "1", "first"], ["longer", "1000", ""]]
    assert aligned(rows, [True, False, True]) == [
        "name    count  why",
        "a           1  first",
        "longer   1000",
    ]
    assert aligned([["a", "b"]], [True, True], gap=" ") == ["a b"]
