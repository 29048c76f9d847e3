"""Snapshots of tables: the side of the worker that saves or restores."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from torchweft import checkpoint
from torchweft.checkpoint import Snapshot, restoring
from torchweft.embedding import occupied, saved
from torchweft.embedding.calls import call_servers
from torchweft.embedding.dynamic import Occupancy
from torchweft.embedding.errors import CapacityError, StepError
from torchweft.embedding.optimizer import TablesOptimizer
from torchweft.embedding.pieces import Piece, from_plain, pieces_of
from torchweft.embedding.plan import Plan
from torchweft.errors import BrokenChain, ConfigurationError, StateMismatch
from torchweft.ids import WorkerInfo
from torchweft.rpc import UNSET_RPC_TIMEOUT, get_worker_info


class Collection(NamedTuple):
    """A collection of tables, as it is saved.

    Attributes:
        name: Its name.
        plan: The tables and where they are.
        servers: The servers, by name.
        staleness: The bound, or None for the asynchronous mode.
        optimizer: This worker's optimizer, if it has one.
        copies: The copies.
        timeout_s: Limit of each call.
    """

    name: str
    plan: Plan
    servers: Mapping[str, WorkerInfo]
    staleness: int | None
    optimizer: TablesOptimizer | None
    copies: nn.Module
    timeout_s: float


class Link(NamedTuple):
    """A snapshot of a chain, and the description of its rows."""

    snapshot: Snapshot
    layout: dict[str, Any]

    @property
    def mark(self) -> str:
        """Tells it from all other snapshots of rows."""
        return str(self.layout["mark"])


def save(
    tables: Collection,
    directory: str | os.PathLike[str],
    step: int,
    state: dict[str, Any] | None,
    keep: int | None,
    since: Snapshot | int | None,
) -> Snapshot:
    """Saves tables and further state; see ``Tables.save``."""
    version, rule = _standing(tables, may_wait=tables.staleness == 0)
    base = None if since is None else _base(tables, directory, since, rule)
    pieces = [held.piece for held in pieces_of(tables.plan.layout)]
    mark = secrets.token_hex(8)
    layout: dict[str, Any] = {
        "pieces": [piece.plain() for piece in pieces],
        "tables": _described(tables.plan),
        "optimizer": rule,
        "lr": None if tables.optimizer is None else float(tables.optimizer.param_groups[0]["lr"]),
        "mark": mark,
        "since": None if base is None else [base.snapshot.name, base.snapshot.step, base.mark],
    }
    entries = _leaving(tables, version, mark, base)
    parts = [entries[piece.server].pop(0) for piece in pieces]
    tree = _tree(tables, layout, parts, state)
    me = [get_worker_info().name]
    needs = [] if base is None else [base.snapshot]
    return checkpoint.save(directory, tree, step=step, keep=keep, random_states=me, needs=needs)


def _base(
    tables: Collection,
    directory: str | os.PathLike[str],
    since: Snapshot | int,
    rule: str,
) -> Link:
    """Returns the snapshot that an increment follows.

    Raises:
        ConfigurationError: It is in another directory.
        SnapshotNotFound: There is none of that step.
        StateMismatch: It is of other tables, or of another optimizer.
    """
    found = since if isinstance(since, Snapshot) else restoring.find(directory, since)
    if found.directory != os.path.abspath(directory):
        raise ConfigurationError(
            f"the snapshot {found.path} is not in {os.path.abspath(directory)}; an increment is "
            "saved beside its base"
        )
    link = _link(found)
    _check(link, tables.plan, rule)
    return link


def _leaving(tables: Collection, version: int, mark: str, base: Link | None) -> dict[str, Any]:
    since = None if base is None else base.mark
    given = dict.fromkeys(tables.servers.values(), (tables.name, version, mark, since))
    try:
        return _call(tables, saved.leaving, given)
    except BrokenChain as error:
        assert base is not None
        path = base.snapshot.path
        raise BrokenChain(
            f"an increment of {path} cannot be saved: {error}. Save a whole snapshot, or the "
            "changes since one that these tables have saved or restored",
            directory=base.snapshot.directory,
            step=base.snapshot.step,
            worker=error.worker,
            base=path,
        ) from error


def restore(
    tables: Collection,
    directory: str | os.PathLike[str],
    state: dict[str, Any] | None,
    step: int | None,
) -> Snapshot:
    """Restores tables and further state; see ``Tables.restore``."""
    _, rule = _standing(tables, may_wait=False)
    chain = _chain(_link(restoring.find(directory, step)))
    for link in chain:
        _check(link, tables.plan, rule)
    *before, last = chain
    rows = []
    for link in before:
        parts = _received(tables, link.layout["pieces"])
        _read(link.snapshot, {"rows": parts})
        rows.append(list(zip(link.layout["pieces"], parts, strict=True)))
    layout: dict[str, Any] = {}
    parts = _received(tables, last.layout["pieces"])
    rows.append(list(zip(last.layout["pieces"], parts, strict=True)))
    # Nothing of the program has changed before all rows have been read.
    restoring.restore_snapshot(
        last.snapshot,
        _tree(tables, layout, parts, state),
        strict=True,
        random_states=True,
        timeout=UNSET_RPC_TIMEOUT,
    )
    given = (tables.name, rows, last.mark, tables.timeout_s)
    _call(tables, saved.adopt, dict.fromkeys(tables.servers.values(), given))
    if tables.optimizer is not None and layout["lr"] is not None:
        tables.optimizer.param_groups[0]["lr"] = layout["lr"]
    return last.snapshot


def move(old: Collection, new: Collection) -> None:
    """Moves all rows, with the state beside them, to the servers of another plan; bit by bit.

    Each server of the new plan takes the rows that it holds from the servers of the old one.

    Raises:
        CapacityError: A server of the new plan has too few rows for the ids that belong there.
    """
    entries = _call(old, saved.offering, dict.fromkeys(old.servers.values(), (old.name,)))
    pieces = [held.piece for held in pieces_of(old.plan.layout)]
    rows = [(piece.plain(), entries[piece.server].pop(0)) for piece in pieces]
    given = (new.name, [rows], secrets.token_hex(8), new.timeout_s)
    _call(new, saved.adopt, dict.fromkeys(new.servers.values(), given))
    # A server leaves out ids for which it has no rows.
    before, after = _occupancy(old), _occupancy(new)
    for table, found in before.items():
        left = after[table]
        if (left.rows, left.waiting) != (found.rows, found.waiting):
            servers = ", ".join(new.servers)
            raise CapacityError(
                f"the ids of table {table!r} do not fit on {servers}, each of which has a part of "
                f"its {found.capacity} rows: {found.rows} have rows and {found.waiting} wait, "
                f"and only {left.rows} and {left.waiting} would be left",
                table=table,
                server=servers,
                count=found.rows,
                limit=left.rows,
            )


def _occupancy(tables: Collection) -> dict[str, Occupancy]:
    given = dict.fromkeys(tables.servers.values(), (tables.name,))
    return occupied.joined_occupancy(_call(tables, occupied.occupancy, given).values())


def _read(snapshot: Snapshot, state: dict[str, Any]) -> None:
    """Restores some of the entries of a snapshot."""
    restoring.restore_snapshot(
        snapshot, state, strict=False, random_states=False, timeout=UNSET_RPC_TIMEOUT
    )


def _link(snapshot: Snapshot) -> Link:
    layout: dict[str, Any] = {}
    _read(snapshot, {"layout": layout})
    return Link(snapshot, layout)


def _chain(last: Link) -> list[Link]:
    """Returns a full snapshot, and the increments that lead from it to a snapshot.

    Raises:
        BrokenChain: One of them is not there, or is another one of that name.
    """
    chain = [last]
    while since := chain[0].layout.get("since"):
        link = chain[0].snapshot
        name, step, mark = since
        base = Snapshot(link.directory, str(name), int(step))
        found = _link(base) if os.path.exists(base.path) else None
        if found is None or found.layout.get("mark") != mark:
            problem = "is not there" if found is None else "is another snapshot of that name"
            raise BrokenChain(
                f"the snapshot {link.path} has the rows that changed since {base.path}, which "
                f"{problem}. Nothing was restored; restore an earlier step, or bring the directory "
                "back as it was written",
                directory=link.directory,
                step=link.step,
                snapshot=link.path,
                base=base.path,
            )
        chain.insert(0, found)
    return chain


def _tree(
    tables: Collection, layout: dict[str, Any], parts: list[Any], state: dict[str, Any] | None
) -> dict[str, Any]:
    tree: dict[str, Any] = {"layout": layout, "rows": parts}
    if tables.plan.copied:
        tree["copies"] = tables.copies
    return {**tree, "program": {} if state is None else state}


def _received(tables: Collection, pieces: list[list[Any]]) -> list[Any]:
    """Returns entries to receive saved pieces: on the servers that wrote them, where possible."""
    names = sorted(tables.servers)
    places = [
        server if server in tables.servers else names[number % len(names)]
        for number, (_, server, *_) in enumerate(pieces)
    ]
    given = {info: (tables.name, places.count(name)) for name, info in tables.servers.items()}
    entries = _call(tables, saved.receiving, given)
    return [entries[place].pop(0) for place in places]


def _standing(tables: Collection, *, may_wait: bool) -> tuple[int, str]:
    """Returns the version of all servers, and their optimizer.

    Raises:
        StepError: The servers are in the middle of a step.
    """
    answers = _call(tables, saved.standing, dict.fromkeys(tables.servers.values(), (tables.name,)))
    versions = {server: version for server, (version, _, _) in answers.items()}
    is_between = may_wait or all(each for _, each, _ in answers.values())
    if len(set(versions.values())) > 1 or not is_between:
        raise StepError(
            f"the servers of {tables.name!r} are in the middle of a step, at versions {versions}; "
            "have all trainers wait between the same two steps"
        )
    return next(((version, rule) for version, _, rule in answers.values()), (0, ""))


def _call(tables: Collection, function: Any, given: Mapping[WorkerInfo, Any]) -> dict[str, Any]:
    return call_servers(function, given, tables.timeout_s) if given else {}


def _described(plan: Plan) -> dict[str, dict[str, Any]]:
    """Returns the form of each table on servers, and the meaning of its ids."""
    return {
        each.name: {
            "rows": each.rows if each.dynamic is None else "dynamic",
            "dim": each.dim,
            "dtype": str(each.dtype),
            "pooling": each.pooling,
            "padding_idx": each.padding_idx,
            "vocabulary": each.vocabulary,
        }
        for each in plan.configs
        if plan.placed[each.name].shards
    }


def _check(link: Link, plan: Plan, rule: str) -> None:
    """Checks that a snapshot is of these tables.

    Raises:
        StateMismatch: It is not; names tables and servers.
    """
    snapshot, layout = link
    there, here = layout.get("tables", {}), _described(plan)
    missing = tuple(sorted(here.keys() - there.keys()))
    unexpected = tuple(sorted(there.keys() - here.keys()))
    saved_on = _servers(map(from_plain, layout.get("pieces", [])))
    now_on = _servers(held.piece for held in pieces_of(plan.layout))
    differing = [
        f"table {name!r}, saved on {saved_on[name]} and now on {now_on[name]}, has "
        f"{part}={there[name].get(part)!r} in the snapshot and {value!r} here"
        for name, form in here.items()
        if name in there
        for part, value in form.items()
        if there[name].get(part) != value
    ]
    if layout.get("optimizer", rule) != rule:
        servers = ", ".join(plan.layout.servers)
        differing.append(
            f"the optimizer is {layout['optimizer'] or None} in the snapshot and {rule or None} "
            f"on {servers}"
        )
    if missing or unexpected or differing:
        lacking = [f"{name!r} (now on {now_on[name]})" for name in missing]
        further = [f"{name!r} (saved on {saved_on.get(name)})" for name in unexpected]
        problems = [
            f"{what} {', '.join(names)}"
            for what, names in (("it lacks", lacking), ("only it has", further))
            if names
        ]
        raise StateMismatch(
            f"the snapshot {snapshot.path} is of other tables on servers: "
            f"{'; '.join([*problems, *differing])}. Nothing was restored",
            directory=snapshot.directory,
            step=snapshot.step,
            missing=missing,
            unexpected=unexpected,
            differing=tuple(differing),
        )


def _servers(pieces: Iterable[Piece]) -> dict[str, str]:
    """Returns the servers of each table."""
    found: dict[str, dict[str, None]] = {}
    for piece in pieces:
        found.setdefault(piece.table, {})[piece.server] = None
    return {table: ", ".join(servers) for table, servers in found.items()}
