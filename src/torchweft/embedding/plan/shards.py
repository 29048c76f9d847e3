"""Cuts tables into shards, and checks that shards cover a table.

A shard has some rows and some columns of a table. The columns of a table are cut into intervals,
and the rows of each interval into stripes: of n shards, the shard k has the rows k, k + n, k + 2n,
...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.embedding.errors import PlanError
from torchweft.embedding.plan.configs import TableConfig


class Shard(NamedTuple):
    """A part of a table on one server.

    Attributes:
        server: Name of the worker.
        rows: The rows, a stripe: ``range(k, table.rows, n)``.
        columns: The columns: ``range(first, last + 1)``.
    """

    server: str
    rows: range
    columns: range


@dataclass(frozen=True)
class RowWise:
    """Cuts a table by row over servers; balances load and memory.

    Args:
        servers: Names of the servers.
    """

    servers: tuple[str, ...]

    def __init__(self, *servers: str) -> None:
        object.__setattr__(self, "servers", servers)

    def shards(self, config: TableConfig) -> tuple[Shard, ...]:
        """Returns the shards of a table.

        Raises:
            PlanError: There are more servers than rows, no server, one is named twice, or one is
                no name.
        """
        count = _checked_count(config, self.servers, config.rows, "rows")
        columns = range(config.dim)
        return tuple(
            Shard(server, range(k, config.rows, count), columns)
            for k, server in enumerate(self.servers)
        )


@dataclass(frozen=True)
class ColumnWise:
    """Cuts a table by column over servers; each server is sent all ids.

    Args:
        servers: Names of the servers.
    """

    servers: tuple[str, ...]

    def __init__(self, *servers: str) -> None:
        object.__setattr__(self, "servers", servers)

    def shards(self, config: TableConfig) -> tuple[Shard, ...]:
        """Returns the shards of a table; the first ones have a column more if necessary.

        Raises:
            PlanError: There are more servers than columns, no server, one is named twice, or one
                is no name.
        """
        count = _checked_count(config, self.servers, config.dim, "columns")
        ends = [-(-config.dim * k // count) for k in range(count + 1)]
        return tuple(
            Shard(server, range(config.rows), range(ends[k], ends[k + 1]))
            for k, server in enumerate(self.servers)
        )


@dataclass(frozen=True)
class TableWise:
    """Puts a whole table on one server.

    Args:
        server: Name of the server.
    """

    server: str

    def shards(self, config: TableConfig) -> tuple[Shard, ...]:
        """Returns the only shard.

        Raises:
            PlanError: The server is no name.
        """
        _checked_count(config, [self.server], 1, "rows")
        return (Shard(self.server, range(config.rows), range(config.dim)),)


@dataclass(frozen=True)
class Copies:
    """Keeps a copy of a table at each trainer, as a parameter with dense gradients."""

    def shards(self, config: TableConfig) -> tuple[Shard, ...]:
        """Returns no shard."""
        return ()


@dataclass(frozen=True)
class Shards:
    """Shards that are listed one by one.

    Args:
        parts: The shards.
    """

    parts: tuple[Shard, ...]

    def __init__(self, parts: Iterable[Shard]) -> None:
        object.__setattr__(self, "parts", tuple(parts))

    def shards(self, config: TableConfig) -> tuple[Shard, ...]:
        """Returns the shards, ordered by column and row.

        Raises:
            PlanError: They do not cover the table.
        """
        check_cover(config, self.parts)
        return tuple(sorted(self.parts, key=lambda each: (each.columns.start, each.rows.start)))


Place = RowWise | ColumnWise | TableWise | Copies | Shards


def check_place(table: str, place: object) -> None:
    """Checks the place that a program has chosen for a table.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(place, Place):
        raise PlanError(
            f"the place of table {table!r} is {place!r}; use RowWise(...), TableWise(...), "
            "ColumnWise(...), Shards(...) or Copies(), with the names of servers",
            table=table,
        )


def check_cover(config: TableConfig, shards: Sequence[Shard]) -> None:
    """Checks that shards have each value of a table once.

    Raises:
        PlanError: A part of the table is in no shard or in two, or a shard goes beyond it.
    """
    end = 0
    by_columns: dict[range, list[Shard]] = {}
    for shard in sorted(shards, key=lambda each: (each.columns.start, each.columns.stop)):
        by_columns.setdefault(shard.columns, []).append(shard)
    for columns, parts in by_columns.items():
        if columns.step != 1 or not columns:
            _refuse(config, f"a shard has the columns {columns}; use range(first, last + 1)")
        if columns.start > end:
            _refuse(config, f"no shard has the columns {_span(end, columns.start)}")
        if columns.start < end:
            _refuse(config, f"the columns {_span(columns.start, end)} are in shards that overlap")
        end = columns.stop
        _check_rows(config, columns, parts)
    if end < config.dim:
        _refuse(config, f"no shard has the columns {_span(end, config.dim)}")
    if end > config.dim:
        _refuse(config, f"a shard has columns up to {end - 1}, and the table has {config.dim}")


def _check_rows(config: TableConfig, columns: range, parts: Sequence[Shard]) -> None:
    count = len(parts)
    expected = {range(k, config.rows, count) for k in range(count)}
    where = f"of the columns {_span(columns.start, columns.stop)}"
    found: dict[range, str] = {}
    for shard in parts:
        if shard.rows in found:
            _refuse(
                config, f"{shard.rows} {where} is on {found[shard.rows]!r} and {shard.server!r}"
            )
        found[shard.rows] = shard.server
    for rows, server in found.items():
        if rows not in expected:
            _refuse(
                config,
                f"the shard on {server!r} has the rows {rows} {where}; {count} shards have "
                f"range(k, {config.rows}, {count}), for k from 0 to {count - 1}",
            )
    _checked_count(config, list(found.values()), config.rows, "rows")


def _checked_count(config: TableConfig, servers: Sequence[str], limit: int, of_what: str) -> int:
    count = len(servers)
    for server in servers:
        if not isinstance(server, str):
            _refuse(
                config,
                f"{server!r} is named as a server; pass names, such as RowWise('worker0', "
                "'worker1') or RowWise(*servers)",
            )
    if not count:
        _refuse(config, "no server is named for it")
    if len(set(servers)) < count:
        _refuse(config, f"its servers are {list(servers)}; name each once")
    if count > limit:
        _refuse(config, f"it has {limit} {of_what}, too few for {count} servers")
    return count


def _refuse(config: TableConfig, reason: str) -> None:
    raise PlanError(f"table {config.name!r} cannot be cut so: {reason}", table=config.name)


def _span(start: int, stop: int) -> str:
    return f"{start}" if stop - start == 1 else f"{start}-{stop - 1}"
