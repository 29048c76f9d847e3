"""Stacks of tables, and the pieces of tables that servers hold.

Tables of equal dimension are a stack: one tensor per server with the rows of all of them. A key
numbers all rows of a stack: ``server * stride + row``, where ``row`` is that in the server's
tensor. A piece is the part of a table on one server, whatever stack has it. So the same rows are
found in two layouts: that of a snapshot, and that of the tables now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchweft.embedding.configs import Shard, TableConfig
from torchweft.extending import rebuilds_plain


class Member(NamedTuple):
    """Some columns of a table in a stack.

    Attributes:
        config: The table.
        columns: The columns.
        server: Position of the first server among those of the stack.
        base: Row of the server's tensor where the rows of the table begin, on each of its servers.
    """

    config: TableConfig
    columns: range
    server: int
    base: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _member, (self.config, self.columns.start, self.columns.stop, self.server, self.base)

    def rows_on(self, server: int, stripes: int) -> range:
        """Returns the rows of the table that a server of the stack holds."""
        first = server if stripes > 1 else 0
        if stripes == 1 and server != self.server:
            return range(0)
        return range(first, self.config.rows, stripes)


@rebuilds_plain
def _member(config: TableConfig, start: int, stop: int, server: int, base: int) -> Member:
    return Member(config, range(start, stop), server, base)


@rebuilds_plain
class Stack(NamedTuple):
    """Tables of equal dimension, type and kind of pooling, on some servers.

    Attributes:
        servers: Names of the servers.
        dim: Number of columns.
        dtype: Type of the values.
        takes_max: Whether its tables pool by maximum.
        stripes: Number of servers over which each member is cut by row: all, or 1 if each member
            is on one server.
        stride: The largest number of rows on a server.
        members: The tables.
    """

    servers: tuple[str, ...]
    dim: int
    dtype: torch.dtype
    takes_max: bool
    stripes: int
    stride: int
    members: tuple[Member, ...]

    def size_on(self, server: int) -> int:
        """Returns the number of rows of a server's tensor."""
        if self.stripes > 1:
            return self.stride
        return sum(each.config.rows for each in self.members if each.server == server)

    def held_on(self, server: int) -> Iterator[tuple[int, Member]]:
        """Yields the members that a server has rows of, with their positions, by row."""
        for number, member in enumerate(self.members):
            if self.stripes > 1 or member.server == server:
                yield number, member

    @property
    def is_dynamic(self) -> bool:
        """Whether it is of a dynamic table, its only member."""
        return self.members[0].config.dynamic is not None

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return self.dim * self.dtype.itemsize


@rebuilds_plain
class Layout(NamedTuple):
    """All stacks of a collection.

    Attributes:
        servers: Names of the servers that hold something, sorted.
        stacks: The stacks.
    """

    servers: tuple[str, ...]
    stacks: tuple[Stack, ...]


class _Kind(NamedTuple):
    """What the tables of a stack have in common; servers, and a name, of some kinds only."""

    dim: int
    dtype: torch.dtype
    takes_max: bool
    servers: tuple[str, ...]
    dynamic: str


def lay_out(configs: Sequence[TableConfig], shards: Mapping[str, Sequence[Shard]]) -> Layout:
    """Returns the stacks of tables.

    Args:
        configs: The tables.
        shards: The shards of each table that is on servers; they cover it.
    """
    kinds: defaultdict[_Kind, list[tuple[TableConfig, Shard]]] = defaultdict(list)
    for config in configs:
        by_columns: defaultdict[range, list[Shard]] = defaultdict(list)
        for shard in shards.get(config.name, ()):
            by_columns[shard.columns].append(shard)
        for columns, parts in by_columns.items():
            parts.sort(key=lambda each: each.rows.start)
            is_cut, name = len(parts) > 1 or config.dynamic is not None, ""
            if config.dynamic is not None:
                name = config.name
            servers = tuple(each.server for each in parts) if is_cut else ()
            kind = _Kind(len(columns), config.dtype, config.pooling == "max", servers, name)
            kinds[kind].append((config, parts[0]))
    stacks = [
        (_striped if kind.servers else _single)(kind, tables) for kind, tables in kinds.items()
    ]
    names = sorted({name for stack in stacks for name in stack.servers})
    return Layout(tuple(names), tuple(stacks))


def _striped(kind: _Kind, tables: Sequence[tuple[TableConfig, Shard]]) -> Stack:
    """Returns a stack of tables that are cut by row over the same servers."""
    members, base = [], 0
    for config, shard in tables:
        members.append(Member(config, shard.columns, 0, base))
        base += -(-config.rows // len(kind.servers))
    stripes = len(kind.servers)
    return Stack(kind.servers, *kind[:3], stripes, base, tuple(members))


def _single(kind: _Kind, tables: Sequence[tuple[TableConfig, Shard]]) -> Stack:
    """Returns a stack of tables that are each on one server."""
    servers = sorted({shard.server for _, shard in tables})
    ends = [0] * len(servers)
    members = []
    for config, shard in tables:
        server = servers.index(shard.server)
        members.append(Member(config, shard.columns, server, ends[server]))
        ends[server] += config.rows
    return Stack(tuple(servers), *kind[:3], 1, max(ends), tuple(members))


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
