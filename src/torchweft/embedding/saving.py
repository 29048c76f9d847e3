"""Snapshots of tables: the side of the worker that saves or restores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from torchweft import checkpoint
from torchweft.embedding import saved
from torchweft.embedding.calls import call_servers
from torchweft.embedding.errors import StepError
from torchweft.embedding.optimizer import TablesOptimizer
from torchweft.embedding.pieces import pieces_of
from torchweft.embedding.plan import Plan
from torchweft.errors import StateMismatch
from torchweft.ids import WorkerInfo
from torchweft.rpc import get_worker_info


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


def save(
    tables: Collection,
    directory: str | os.PathLike[str],
    step: int,
    state: dict[str, Any] | None,
    keep: int | None,
) -> checkpoint.Snapshot:
    """Saves tables and further state; see ``Tables.save``."""
    version, rule = _standing(tables, may_wait=tables.staleness == 0)
    given = dict.fromkeys(tables.servers.values(), (tables.name, version))
    entries = _call(tables, saved.leaving, given)
    pieces = [held.piece for held in pieces_of(tables.plan.layout)]
    layout = {
        "pieces": [piece.plain() for piece in pieces],
        "tables": _described(tables.plan),
        "optimizer": rule,
        "lr": None if tables.optimizer is None else float(tables.optimizer.param_groups[0]["lr"]),
    }
    parts = [entries[piece.server].pop(0) for piece in pieces]
    tree = _tree(tables, layout, parts, state)
    me = [get_worker_info().name]
    return checkpoint.save(directory, tree, step=step, keep=keep, random_states=me)


def restore(
    tables: Collection,
    directory: str | os.PathLike[str],
    state: dict[str, Any] | None,
    step: int | None,
) -> checkpoint.Snapshot:
    """Restores tables and further state; see ``Tables.restore``."""
    _, rule = _standing(tables, may_wait=False)
    layout: dict[str, Any] = {}
    # First the description alone: it tells which entries there are.
    snapshot = checkpoint.restore(
        directory, {"layout": layout}, step=step, strict=False, random_states=False
    )
    _check(snapshot, layout, _described(tables.plan), rule)
    parts = _received(tables, layout["pieces"])
    checkpoint.restore(directory, _tree(tables, layout, parts, state), step=snapshot.step)
    rows = list(zip(layout["pieces"], parts, strict=True))
    given = dict.fromkeys(tables.servers.values(), (tables.name, rows, tables.timeout_s))
    _call(tables, saved.adopt, given)
    if tables.optimizer is not None and layout["lr"] is not None:
        tables.optimizer.param_groups[0]["lr"] = layout["lr"]
    return snapshot


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


def _standing(tables: Collection, *, may_wait: bool) -> tuple[int, list[str]]:
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
    return next(((version, rule) for version, _, rule in answers.values()), (0, []))


def _call(tables: Collection, function: Any, given: Mapping[WorkerInfo, Any]) -> dict[str, Any]:
    return call_servers(function, given, tables.timeout_s) if given else {}


def _described(plan: Plan) -> dict[str, list[Any]]:
    """Returns the form of each table on servers."""
    return {
        each.name: [each.rows if each.dynamic is None else "dynamic", each.dim, str(each.dtype)]
        for each in plan.configs
        if plan.placed[each.name].shards
    }


def _check(
    snapshot: checkpoint.Snapshot,
    layout: Mapping[str, Any],
    tables: Mapping[str, list[Any]],
    rule: list[str],
) -> None:
    there = layout.get("tables", {})
    missing = tuple(sorted(tables.keys() - there.keys()))
    unexpected = tuple(sorted(there.keys() - tables.keys()))
    differing = [
        f"table {name!r} is {there[name]} in the snapshot and {form} here"
        for name, form in tables.items()
        if name in there and there[name] != form
    ]
    if layout.get("optimizer", rule) != rule:
        differing.append(f"the optimizer is {layout['optimizer']} in the snapshot and {rule} here")
    if missing or unexpected or differing:
        raise StateMismatch(
            f"the snapshot {snapshot.path} is of other tables on servers: it lacks "
            f"{list(missing)}, only it has {list(unexpected)}, and they differ: {differing}. "
            "Nothing was restored",
            directory=snapshot.directory,
            step=snapshot.step,
            missing=missing,
            unexpected=unexpected,
            differing=tuple(differing),
        )
