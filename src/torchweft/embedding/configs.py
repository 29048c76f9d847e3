"""Tables as a program describes them: sizes, pooling, initial values, and places on servers.

A shard has some rows and some columns of a table. The columns of a table are cut into intervals,
and the rows of each interval into stripes: of n shards, the shard k has the rows k, k + n, k + 2n,
...
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from torchweft.arguments import is_number
from torchweft.embedding.errors import PlanError
from torchweft.extending import rebuilds_plain

Pooling = Literal["sum", "mean", "max", "none"]
_POOLINGS = ("sum", "mean", "max", "none")
Evict = Literal["age", "frequency"]
_EVICTS = ("age", "frequency")
_DTYPES = (torch.float32, torch.float64)


@rebuilds_plain
@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution, as those of ``nn.Embedding``."""

    mean: float = 0.0
    std: float = 1.0


@rebuilds_plain
@dataclass(frozen=True)
class Uniform:
    """Initial values from a uniform distribution over ``[low, high)``."""

    low: float = -0.1
    high: float = 0.1


@rebuilds_plain
@dataclass(frozen=True)
class Constant:
    """The same initial value everywhere."""

    value: float = 0.0


Initial = Normal | Uniform | Constant


@rebuilds_plain
@dataclass(frozen=True)
class Dynamic:
    """Ids that are any int64, and have rows while they are in use.

    An id gets a row in the step in which it is the ``admit_after``-th time among those with a
    gradient; until then, it is read as its initial value. If the table is full, others lose theirs.

    Args:
        admit_after: In how many steps an id occurs before it is trained, that step included.
        evict: Whether a full table gives up the rows that were trained longest ago, or those that
            were trained in the fewest steps.
        ttl: The time to live: an id expires when it has not occurred in the last ``ttl`` steps of
            its table, whether the table is full or not. An expired id loses row, state and count.
            None for no limit.
        min_frequency: An id with a row expires when it has occurred in less than this share of the
            steps since it first did, such as 0.001; so those with one step live for 1000.

    Raises:
        PlanError: A value cannot work.
    """

    admit_after: int = 1
    evict: Evict = "age"
    ttl: int | None = None
    min_frequency: float = 0.0

    def __post_init__(self) -> None:
        if type(self.admit_after) is not int or self.admit_after < 1:
            raise PlanError(f"admit_after={self.admit_after!r}; it must be a positive integer")
        if self.evict not in _EVICTS:
            raise PlanError(f"evict={self.evict!r}; use one of {', '.join(_EVICTS)}")
        if self.ttl is not None and (type(self.ttl) is not int or self.ttl < 1):
            raise PlanError(f"ttl={self.ttl!r}; it must be a positive number of steps, or None")
        is_share = is_number(self.min_frequency) and 0 <= self.min_frequency <= 1
        if not is_share:
            raise PlanError(f"min_frequency={self.min_frequency!r}; it is a share of steps, 0 to 1")


@rebuilds_plain
@dataclass(frozen=True)
class TableConfig:
    """A table.

    Args:
        name: Its name, without dots; also its name in the inputs and outputs of lookups.
        rows: Number of rows, so ids are from 0 to ``rows - 1``. With dynamic ids, the largest
            number of rows that the servers hold together.
        dim: Number of columns.
        pooling: ``sum``, ``mean`` or ``max`` of each bag, as ``nn.EmbeddingBag``; or ``none`` for
            a row for each id, as ``nn.Embedding``.
        dtype: ``torch.float32`` or ``torch.float64``.
        initial: The initial values.
        padding_idx: An id that does not count in a bag, and whose row is never changed; its row
            begins as zeros. Negative numbers count from the end, but not with dynamic ids.
        dynamic: For dynamic ids: when they get rows, and which lose them. None for ids that are
            numbers of rows.
        vocabulary: The meaning of the ids, such as a version or a hash of the list of words.
            Trainers and snapshots with another one are refused.

    Raises:
        PlanError: A value cannot work.
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling = "sum"
    dtype: torch.dtype = torch.float32
    initial: Initial = field(default_factory=Normal)
    padding_idx: int | None = None
    dynamic: Dynamic | None = None
    vocabulary: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise PlanError(f"a table is named {self.name!r}; use a name without dots")
        for name, value in (("rows", self.rows), ("dim", self.dim)):
            if type(value) is not int or value < 1:
                self._refuse(f"{name}={value!r}; it must be a positive integer")
        if self.pooling not in _POOLINGS:
            self._refuse(f"pooling={self.pooling!r}; use one of {', '.join(_POOLINGS)}")
        if self.dtype not in _DTYPES:
            self._refuse(f"dtype={self.dtype}; rows are of torch.float32 or torch.float64")
        if not isinstance(self.initial, (Normal, Uniform, Constant)):
            self._refuse(f"initial={self.initial!r}; use Normal, Uniform or Constant")
        if not all(is_number(value) for value in vars(self.initial).values()):
            self._refuse(f"initial={self.initial!r}; its values are numbers")
        if not isinstance(self.vocabulary, str):
            self._refuse(f"vocabulary={self.vocabulary!r}; name it, by a version or a hash")
        if self.padding_idx is not None and type(self.padding_idx) is not int:
            self._refuse(f"padding_idx={self.padding_idx!r}; it is an integer, or None")
        if self.dynamic is not None:
            self._check_dynamic()
        elif self.padding_idx is not None:
            if not -self.rows <= self.padding_idx < self.rows:
                self._refuse(f"padding_idx={self.padding_idx}, and there are {self.rows} rows")
            object.__setattr__(self, "padding_idx", self.padding_idx % self.rows)

    def _check_dynamic(self) -> None:
        if not isinstance(self.dynamic, Dynamic):
            self._refuse(f"dynamic={self.dynamic!r}; use Dynamic()")
        if self.padding_idx is not None and not -(2**63) <= self.padding_idx < 2**63:
            self._refuse(f"padding_idx={self.padding_idx}, which is no int64")

    def _refuse(self, reason: str) -> None:
        raise PlanError(f"table {self.name!r} has {reason}", table=self.name)

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return self.dim * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """The size of the table."""
        return self.rows * self.row_bytes

    @property
    def number(self) -> int:
        """A number that follows from the name alone, for seeds."""
        return zlib.crc32(self.name.encode())


def check_names(configs: Iterable[TableConfig]) -> tuple[TableConfig, ...]:
    """Returns the tables.

    Raises:
        PlanError: There is none, one is of another type, or two have the same name.
    """
    if not isinstance(configs, Iterable):
        raise PlanError(f"the tables are {configs!r}; pass a list of TableConfig")
    found = tuple(configs)
    if not found:
        raise PlanError("there is no table; pass at least one TableConfig")
    seen: set[str] = set()
    for config in found:
        if not isinstance(config, TableConfig):
            raise PlanError(f"a table is a {type(config).__name__}; describe it by a TableConfig")
        if config.name in seen:
            raise PlanError(f"two tables are named {config.name!r}", table=config.name)
        seen.add(config.name)
    return found


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
class _Cut:
    """Cuts a table over servers.

    Args:
        servers: Names of the servers.
    """

    servers: tuple[str, ...]

    def __init__(self, *servers: str) -> None:
        object.__setattr__(self, "servers", servers)


@dataclass(frozen=True, init=False)
class RowWise(_Cut):
    """Cuts a table by row over servers; balances load and memory.

    Args:
        servers: Names of the servers.
    """

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


@dataclass(frozen=True, init=False)
class ColumnWise(_Cut):
    """Cuts a table by column over servers; each server is sent all ids.

    Args:
        servers: Names of the servers.
    """

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
