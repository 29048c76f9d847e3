"""Rows of text whose columns are aligned, for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], is_left: Sequence[bool], gap: str = "  ") -> list[str]:
    """Returns a line for each row.

    Args:
        rows: Their cells; all rows have as many.
        is_left: Whether a column is left-aligned; for each column.
        gap: Stands between columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]
