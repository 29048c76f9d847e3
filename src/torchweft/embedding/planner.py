"""Decides where each table goes, and what a step of it sends.

A table on servers sends the rows that are touched; copies send all of it, in an all-reduce (Kim et
al., "Parallax", EuroSys 2019). Both grow with the number of trainers. So the decision depends on
the share of rows that a trainer touches in a step.

What a table on servers sends is computed as lookups compute it: rows or sums of bags, whichever are
fewer bytes, in the form of messages; to each server of a cut. Bytes between a trainer and a server
that are one worker are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchweft.arguments import check_type, check_workers, did_you_mean, is_number
from torchweft.columns import aligned
from torchweft.embedding.configs import (
    ColumnWise,
    Copies,
    Place,
    RowWise,
    Shard,
    Shards,
    TableConfig,
    TableWise,
    check_names,
    check_place,
)
from torchweft.embedding.errors import PlanError
from torchweft.embedding.inputs import Checker, Flat
from torchweft.embedding.layout import Layout, lay_out
from torchweft.embedding.rows import Wire, row_bytes

ID_BYTES: Final = 4
"""Size of a row's number in messages; dynamic ids have twice that."""

_INDEX_BYTES: Final = 8
"""Size of a row's number in a sparse tensor."""
_COPIES_LIMIT_BYTES: Final = 2**30
_ROW_COST: Final = 2.0
_WORDS = {RowWise: "by row", ColumnWise: "by column", TableWise: "whole", Shards: "shards"}


class Touched(float):
    """The share of its rows that a trainer touches in a step; a float with what else is known.

    Attributes:
        ids: How many ids a trainer looks up in a step; 0 if that is not known.
        bags: How many bags these are in; 0 without pooling, or if that is not known.
    """

    ids: float
    bags: float

    def __new__(cls, share: float, ids: float = 0.0, bags: float = 0.0) -> Touched:
        """Returns a share of rows."""
        found = super().__new__(cls, share)
        found.ids, found.bags = ids, bags
        return found

    @classmethod
    def mean(cls, shares: Sequence[float]) -> Touched:
        """Returns the means over several trainers."""
        parts = [(each, getattr(each, "ids", 0.0), getattr(each, "bags", 0.0)) for each in shares]
        return cls(*(sum(of_all) / len(shares) for of_all in zip(*parts, strict=True)))


class Placed(NamedTuple):
    """Where a table goes, and why.

    Attributes:
        place: The kind of its place.
        shards: Its shards; none for copies.
        touched: Share of its rows that a trainer touches in a step; None if it is not known.
        server_bytes: What a step sends if the table is on servers, of all trainers; None if the
            share is not known.
        copies_bytes: What a step sends if each trainer has a copy, of all trainers.
        gather_bytes: What an all-gather of sparse gradients would send, in place of servers; None
            if the share is not known.
        reason: Why it goes there.
    """

    place: Place
    shards: tuple[Shard, ...]
    touched: float | None
    server_bytes: int | None
    copies_bytes: int
    gather_bytes: int | None
    reason: str

    @property
    def is_copied(self) -> bool:
        """Whether each trainer has a copy."""
        return not self.shards

    @property
    def step_bytes(self) -> int | None:
        """What a step sends, of all trainers; None if that is not known."""
        return self.copies_bytes if self.is_copied else self.server_bytes


@dataclass(frozen=True)
class Plan:
    """The places of all tables; printed as a table.

    Attributes:
        configs: The tables.
        placed: The place of each table, by name.
        trainers: Number of trainers.
    """

    configs: tuple[TableConfig, ...]
    placed: Mapping[str, Placed]
    trainers: int

    @property
    def layout(self) -> Layout:
        """The stacks of the tables that are on servers."""
        return lay_out(self.configs, {name: each.shards for name, each in self.placed.items()})

    @property
    def copied(self) -> tuple[TableConfig, ...]:
        """The tables of which each trainer has a copy."""
        return tuple(each for each in self.configs if self.placed[each.name].is_copied)

    def __str__(self) -> str:
        """Returns a line for each table: sizes, place, bytes that a step sends, and the reason."""
        numbers = ("rows", "dim", "size", "touched", "bytes/step", "all-gather")
        header = ("table", *numbers[:3], "place", *numbers[3:], "reason")
        lines = [header, *(self._line(config) for config in self.configs)]
        shown = "\n".join(aligned(lines, [title not in numbers for title in header]))
        trainers = f"{self.trainers} trainer{'s' * (self.trainers != 1)}"
        return f"{shown}\n{trainers}; bytes of all of them, without headers"

    def _line(self, config: TableConfig) -> tuple[str, ...]:
        placed = self.placed[config.name]
        where = "copies"
        if placed.shards:
            servers = dict.fromkeys(shard.server for shard in placed.shards)
            where = f"{_WORDS[type(placed.place)]}: {', '.join(servers)}"
        return (
            config.name,
            f"{config.rows:,}",
            str(config.dim),
            _bytes_text(config.size_bytes),
            where,
            "?" if placed.touched is None else f"{placed.touched:.2%}",
            shown_bytes(placed.step_bytes),
            shown_bytes(placed.gather_bytes),
            placed.reason,
        )


def plan_tables(
    configs: Iterable[TableConfig],
    servers: Sequence[str],
    *,
    trainers: int | Sequence[str] = 1,
    touched: Mapping[str, float] | None = None,
    places: Mapping[str, Place] | None = None,
    wire: Wire = Wire(),  # noqa: B008  # immutable
    copies_limit_bytes: int = _COPIES_LIMIT_BYTES,
    row_cost: float = _ROW_COST,
) -> Plan:
    """Decides where each table goes.

    A table whose touched rows cost less than an all-reduce of all of it goes to the servers. So
    does a table that is too large for copies, or whose share of touched rows is not known. Tables
    larger than half of a server's part of all rows are cut by row over all servers. The others go
    whole to the server with the fewest bytes: if servers pool, that moves fewer bytes.

    Args:
        configs: The tables.
        servers: Names of the workers that hold rows.
        trainers: Number of trainers, or their names: then bytes between a trainer and a server of
            the same name do not count.
        touched: Share of its rows that a trainer touches in a step, by table; see
            ``touched_shares``, which also counts ids and bags. Without these, sums of bags are not
            considered.
        places: Places that are decided already, by table.
        wire: The form of values in messages; see ``Tables``.
        copies_limit_bytes: Size of all copies together that a trainer may have.
        row_cost: Cost of a byte of a row, which is looked up, sorted and sent, in bytes of an
            all-reduce.

    Raises:
        PlanError: A table cannot be placed as requested, or a name is of no table.
        ArgumentTypeError: An argument is of a wrong type.
    """
    found = check_names(configs)
    check_workers(servers, "servers")
    check_type(wire, Wire, "wire", "Wire('fp16', 'fp16')")
    shares = _checked_shares(found, {} if touched is None else touched)
    _check_known(found, {} if places is None else places, "places")
    decided = dict(places or {})
    for name, place in decided.items():
        check_place(name, place)
    if not isinstance(trainers, int):
        check_workers(trainers, "trainers")
    names = [""] * trainers if isinstance(trainers, int) else list(trainers)
    if not names:
        raise PlanError(f"trainers={trainers!r}; there is at least one")
    # Where a table would be on servers.
    undecided = [each for each in found if each.name not in decided]
    there = {**(_spread(undecided, servers) if servers else {}), **decided}

    def sent(config: TableConfig) -> int | None:
        place = there.get(config.name, Copies())
        shards = place.shards(config)
        return server_bytes(config, shards, shares.get(config.name), names, wire)

    reasons: dict[str, str] = {}
    left_bytes = copies_limit_bytes
    for config in sorted(found, key=lambda each: each.size_bytes):
        reasons[config.name] = "requested"
        if config.name not in decided:
            is_copied, reason = _decided(
                config, sent(config), copies_bytes(config, len(names)), row_cost, left_bytes
            )
            reasons[config.name] = reason
            if is_copied:
                decided[config.name] = Copies()
        if isinstance(decided.get(config.name), Copies):
            left_bytes -= config.size_bytes
    decided |= _spread([each for each in found if each.name not in decided], servers)
    placed = {}
    for config in found:
        shards = _checked(config, decided[config.name].shards(config))
        share = shares.get(config.name)
        placed[config.name] = Placed(
            decided[config.name],
            shards,
            share,
            server_bytes(config, shards, share, names, wire) if shards else sent(config),
            copies_bytes(config, len(names)),
            gather_bytes(config, share, len(names)),
            reasons[config.name],
        )
    return Plan(found, placed, len(names))


def _spread(configs: Sequence[TableConfig], servers: Sequence[str]) -> dict[str, Place]:
    """Returns places on servers: large tables are cut by row, others go whole to the emptiest."""
    if configs and not servers:
        raise PlanError(
            f"no server is named, so table {configs[0].name!r} can go to none; pass their names, "
            "or places={...: Copies()}",
            table=configs[0].name,
        )
    share_bytes = sum(each.size_bytes for each in configs) / max(1, len(servers))
    loads = dict.fromkeys(servers, 0)
    places: dict[str, Place] = {}
    for config in sorted(configs, key=lambda each: each.size_bytes, reverse=True):
        if config.size_bytes > share_bytes / 2 and len(servers) > 1:
            places[config.name] = RowWise(*servers[: config.rows])
        else:
            emptiest = min(loads, key=lambda server: loads[server])
            places[config.name] = TableWise(emptiest)
            loads[emptiest] += config.size_bytes
    return places


def _checked(config: TableConfig, shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """Returns the shards of a table, where they may be of it."""
    if config.dynamic is not None and {shard.columns for shard in shards} != {range(config.dim)}:
        raise PlanError(
            f"table {config.name!r} has dynamic ids, and cannot have copies or be cut by column; "
            "cut it by row, or put it on one server",
            table=config.name,
        )
    return shards


def _decided(
    config: TableConfig,
    rows_bytes: int | None,
    whole_bytes: int,
    row_cost: float,
    left_bytes: int,
) -> tuple[bool, str]:
    """Returns whether a table is copied, and why."""
    if config.dynamic is not None:
        return False, "dynamic ids"
    if config.size_bytes > left_bytes:
        return False, "too large for copies"
    if rows_bytes is None:
        return False, "the share of touched rows is not known"
    compared = f"{_bytes_text(rows_bytes)} of rows, {_bytes_text(whole_bytes)} of an all-reduce"
    if rows_bytes * row_cost < whole_bytes:
        return False, f"sparse: {compared}"
    return True, f"dense: {compared}"


def server_bytes(
    config: TableConfig,
    shards: Sequence[Shard],
    touched: float | None,
    trainers: Sequence[str],
    wire: Wire = Wire(),  # noqa: B008  # immutable
) -> int | None:
    """Returns what a step of a table on servers sends, pulled and pushed, of all trainers.

    Args:
        config: The table.
        shards: Where it is; without shards, as if it were whole on another worker.
        touched: The share of its rows that a trainer touches; with ids and bags if they are known.
        trainers: Names of the trainers.
        wire: The form of values in messages.
    """
    if touched is None:
        return None
    by_columns: dict[range, list[str]] = {}
    for shard in shards or [Shard("", range(config.rows), range(config.dim))]:
        by_columns.setdefault(shard.columns, []).append(shard.server)
    total = 0.0
    for columns, servers in by_columns.items():
        sent = _cut_bytes(config, len(columns), len(servers), touched, wire)
        for trainer in trainers:
            total += sent * (1 - servers.count(trainer) / len(servers))
    return round(total)


def _cut_bytes(config: TableConfig, dim: int, servers: int, touched: float, wire: Wire) -> float:
    """Returns what one trainer exchanges with the servers of some columns."""
    number = ID_BYTES if config.dynamic is None else 2 * ID_BYTES
    pulled, pushed = (row_bytes(form, dim, config.dtype) for form in (wire.pulled, wire.pushed))
    rows = float(touched) * config.rows
    as_rows = rows * (2 * number + pulled + pushed)
    if not isinstance(touched, Touched) or not touched.bags:
        return as_rows
    if config.pooling not in ("sum", "mean") or config.dynamic is not None:
        return as_rows
    bags = servers * touched.bags
    as_sums = 2 * number * (touched.ids + rows) + bags * (number + pulled + pushed)
    return min(as_rows, as_sums)


def gather_bytes(config: TableConfig, touched: float | None, trainers: int) -> int | None:
    """Returns what an all-gather of sparse gradients sends: each trainer's rows to all others."""
    if touched is None:
        return None
    rows = float(touched) * config.rows
    return round(trainers * (trainers - 1) * rows * (_INDEX_BYTES + config.row_bytes))


def copies_bytes(config: TableConfig, trainers: int) -> int:
    """Returns what a ring all-reduce of a table's gradient sends."""
    return 2 * (trainers - 1) * config.size_bytes


def _checked_shares(
    configs: Sequence[TableConfig], touched: Mapping[str, float]
) -> Mapping[str, float]:
    _check_known(configs, touched, "touched")
    for name, share in touched.items():
        if not is_number(share) or not 0 <= share <= 1:
            raise PlanError(f"touched has {share!r} for table {name!r}; a share is from 0 to 1")
    return touched


def _check_known(configs: Sequence[TableConfig], given: Mapping[str, Any], what: str) -> None:
    check_type(given, Mapping, what, f"a dict, such as {what}={{{configs[0].name!r}: ...}}")
    names = [config.name for config in configs]
    for name in given:
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise PlanError(f"{what} names {name!r}, which is no table{hint}", table=str(name))


def shown_bytes(count: int | None) -> str:
    """Returns a number of bytes as a plan shows it."""
    return "?" if count is None else f"{count:,}"


def _bytes_text(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def touched_shares(
    configs: Iterable[TableConfig], batches: Iterable[Mapping[str, Any]]
) -> dict[str, Touched]:
    """Returns the mean share of its rows that a batch touches, by table; also of ids and bags.

    Args:
        configs: The tables.
        batches: Batches of one trainer: by table, ids as for a lookup, or a tensor of ids of any
            shape. A table that a batch lacks is not touched by it. The padding of bags does not
            count.

    Raises:
        PlanError: There is no batch, or one names a table that there is not.
        BadIds: Ids are of a wrong type or shape.
        BadOffsets: Offsets do not begin at 0, do not rise, or go beyond the ids.
        IdOutOfRange: A table has no row for an id.
    """
    checkers = {config.name: Checker(config) for config in check_names(configs)}
    rows, ids, bags = (dict.fromkeys(checkers, 0) for _ in range(3))
    count = 0
    for count, batch in enumerate(batches, start=1):  # noqa: B007  # counts
        for name, value in batch.items():
            flat = _flat(checkers, name, value)
            rows[name] += len(torch.unique(flat.ids))
            ids[name] += flat.n_ids
            bags[name] += 0 if checkers[name].config.pooling == "none" else _bags(value, flat)
    if not count:
        raise PlanError("there is no batch to count rows in")
    return {
        # A dynamic table may be full before a batch is at its end.
        name: Touched(
            min(1.0, rows[name] / count / checkers[name].config.rows),
            ids[name] / count,
            bags[name] / count,
        )
        for name in rows
    }


def _bags(value: Any, flat: Flat) -> int:
    """Returns how many bags an input has; none if it has not the form of a lookup's."""
    is_plain = isinstance(value, Tensor) and not value.is_nested
    if is_plain:
        return value.shape[0] if value.dim() == 2 else 0
    return flat.bags


def _flat(checkers: Mapping[str, Checker], name: str, value: Any) -> Flat:
    checker = checkers.get(name)
    if checker is None:
        hint = did_you_mean(name, list(checkers))
        raise PlanError(f"a batch names {name!r}, which is no table{hint}", table=name)
    if isinstance(value, Tensor) and not value.is_nested:
        value = value.reshape(-1, 1)  # of any shape
    return checker.flat(value)
