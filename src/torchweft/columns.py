"""Text for people: rows whose columns are aligned, and no characters that control a terminal."""

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


def printable(text: str, kept: str = "") -> str:
    """Returns a text with all characters that do not show escaped.

    Others have made the text: such characters move the cursor, change the title and the colours of
    a terminal, have it answer, or reverse what is read.

    Args:
        text: The text.
        kept: Characters that stay, such as those between lines.
    """
    shown = text
    for each in kept:
        shown = shown.replace(each, "")
    if shown.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


LAYOUT = "\n\t"
"""Characters that stay in texts of several lines."""
