"""The pieces into which tables are cut: their rows and columns, whatever stack and server has them.

So the same rows are found in two layouts: that of a snapshot, and that of the tables now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.embedding.plan import Layout

Plain = Sequence[str | int]
"""A piece as a snapshot describes it: table, server, rows (start, stop, step), columns."""
Cut = tuple[int, int, int]
"""Start, stop and step of a slice."""


class Piece(NamedTuple):
    """Some rows and columns of a table, on one server.

    Attributes:
        table: Name of the table.
        server: Name of the server.
        rows: The rows; every n-th of a table that is cut by row.
        columns: The columns.
    """

    table: str
    server: str
    rows: range
    columns: range

    def plain(self) -> list[str | int]:
        """Returns the description that a snapshot holds."""
        rows, columns = self.rows, self.columns
        ends = [rows.start, rows.stop, rows.step, columns.start, columns.stop]
        return [self.table, self.server, *ends]


class Held(NamedTuple):
    """A piece, and where its server has it.

    Attributes:
        piece: The piece.
        stack: Number of the stack.
        member: Number of the table in the stack.
    """

    piece: Piece
    stack: int
    member: int


def from_plain(plain: Plain) -> Piece:
    """Returns a piece from its description in a snapshot."""
    table, server = (str(each) for each in plain[:2])
    start, stop, step, first, end = (int(each) for each in plain[2:])
    return Piece(table, server, range(start, stop, step), range(first, end))


def pieces_of(layout: Layout) -> list[Held]:
    """Returns all pieces of a layout; those of a server are in the order in which it has them."""
    found = []
    for number, stack in enumerate(layout.stacks):
        for position, member in enumerate(stack.members):
            for place, server in enumerate(stack.servers):
                rows = member.rows_on(place, stack.stripes)
                if rows:
                    piece = Piece(member.config.name, server, rows, member.columns)
                    found.append(Held(piece, number, position))
    return found


def common(one: range, other: range) -> range:
    """Returns the numbers that two rising ranges have in common."""
    first = max(0, -((one.start - other.start) // one.step))  # the first one not below the other
    # The remainders of one's numbers by the other's step repeat after at most so many of them.
    for number in one[first : first + other.step]:
        if number in other:
            return range(number, min(one.stop, other.stop), math.lcm(one.step, other.step))
    return range(0)


def within(part: range, whole: range) -> Cut:
    """Returns where the numbers of a part, at least one, are in the whole."""
    start, step = whole.index(part[0]), part.step // whole.step
    return start, start + (len(part) - 1) * step + 1, step
