"""Snapshots of tables, and their way to other servers: the side of the worker that calls them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from torch import nn

from torchweft import checkpoint, rpc
from torchweft.arguments import check_type
from torchweft.checkpoint import Snapshot
from torchweft.embedding.client import Client
from torchweft.embedding.dynamic import Occupancy
from torchweft.embedding.errors import CapacityError, PlanError, StepError
from torchweft.embedding.layout import Piece, from_plain, pieces_of
from torchweft.embedding.optimizer import TablesOptimizer
from torchweft.embedding.planner import Plan
from torchweft.embedding.rules import Rule
from torchweft.errors import BrokenChain, ConfigurationError, StateMismatch, WeftError
from torchweft.rpc import get_worker_info

T = TypeVar("T")


class Collection(NamedTuple):
    """A collection of tables, as it is saved and moved.

    Attributes:
        client: Calls its servers.
        plan: The tables and where they are.
        optimizer: This worker's optimizer, if it has one.
        copies: The copies.
    """

    client: Client
    plan: Plan
    optimizer: TablesOptimizer | None
    copies: nn.Module


class Link(NamedTuple):
    """A snapshot of a chain, and the description of its rows; its mark tells it from all others."""

    snapshot: Snapshot
    layout: dict[str, Any]


def save(
    tables: Collection,
    directory: str | os.PathLike[str],
    step: int,
    state: dict[str, Any] | None,
    keep: int | None,
    since: Snapshot | int | None,
) -> Snapshot:
    """Saves tables and further state; see ``Tables.save``."""
    version, rule = _standing(tables.client, may_wait=tables.client.staleness == 0)
    base = None if since is None else _base(tables, directory, since, rule)
    pieces = [held.piece for held in pieces_of(tables.plan.layout)]
    mark, since_mark, origin = secrets.token_hex(8), None, None
    if base is not None:
        since_mark = base.layout["mark"]
        origin = [base.snapshot.name, base.snapshot.step, since_mark]
    layout: dict[str, Any] = {
        "pieces": [piece.plain() for piece in pieces],
        "tables": _described(tables.plan),
        "optimizer": rule,
        "lr": None if tables.optimizer is None else float(tables.optimizer.param_groups[0]["lr"]),
        "mark": mark,
        "since": origin,
    }
    try:
        entries = tables.client.call_all("leave", version, mark, since_mark)
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
    found = since if isinstance(since, Snapshot) else checkpoint.find(directory, since)
    if found.directory != os.path.abspath(directory):
        raise ConfigurationError(
            f"the snapshot {found.path} is not in {os.path.abspath(directory)}; an increment is "
            "saved beside its base"
        )
    link = _link(found)
    _check(link, tables.plan, rule)
    return link


def restore(
    tables: Collection,
    directory: str | os.PathLike[str],
    state: dict[str, Any] | None,
    step: int | None,
) -> Snapshot:
    """Restores tables and further state; see ``Tables.restore``."""
    _, rule = _standing(tables.client, may_wait=False)
    chain = _chain(_link(checkpoint.find(directory, step)))
    for link in chain:
        _check(link, tables.plan, rule)
    rows, layout = [], dict[str, Any]()
    for link in chain:
        pieces = link.layout["pieces"]
        parts = _received(tables.client, pieces)
        rows.append(list(zip(pieces, parts, strict=True)))
        if link is not chain[-1]:
            _read(link.snapshot, {"rows": parts})
    # Nothing of the program has changed before all rows have been read.
    checkpoint.restore(link.snapshot, _tree(tables, layout, parts, state))
    tables.client.call_all("adopt", rows, link.layout["mark"], tables.client.timeout_s)
    if tables.optimizer is not None and layout["lr"] is not None:
        tables.optimizer.param_groups[0]["lr"] = layout["lr"]
    return link.snapshot


def _read(snapshot: Snapshot, state: dict[str, Any]) -> None:
    """Restores some of the entries of a snapshot."""
    checkpoint.restore(snapshot, state, strict=False, random_states=False)


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


def _received(client: Client, pieces: list[list[Any]]) -> list[Any]:
    """Returns entries to receive saved pieces: on the servers that wrote them, where possible."""
    names = sorted(client.servers)
    places = [
        server if server in client.servers else names[number % len(names)]
        for number, (_, server, *_) in enumerate(pieces)
    ]
    entries = client.call("receive", {name: (places.count(name),) for name in names})
    return [entries[place].pop(0) for place in places]


def _standing(client: Client, *, may_wait: bool) -> tuple[int, str]:
    """Returns the version of all servers, and their optimizer.

    Raises:
        StepError: The servers are in the middle of a step.
    """
    answers = client.call_all("standing")
    versions = {server: version for server, (version, _, _) in answers.items()}
    is_between = may_wait or all(each for _, each, _ in answers.values())
    if len(set(versions.values())) > 1 or not is_between:
        raise StepError(
            f"the servers of {client.name!r} are in the middle of a step, at versions {versions}; "
            "have all trainers wait between the same two steps"
        )
    return next(((version, rule) for version, _, rule in answers.values()), (0, ""))


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


# Other places. All trainers make each part.


def check_move(tables: Collection, plan: Plan, *, has_gradients: bool) -> None:
    """Checks that tables can go to the places of another plan.

    Args:
        tables: The collection as it is.
        plan: The places.
        has_gradients: Whether this trainer has gradients that were not pushed.

    Raises:
        ConfigurationError: This trainer cannot do its part.
        PlanError: The tables cannot be moved there.
    """
    client = tables.client
    if client.trainer < 0:
        raise ConfigurationError(f"this worker is not among the trainers {client.trainers}")
    if has_gradients:
        raise ConfigurationError(
            f"tables {client.name!r} have gradients that were not pushed; make the step first, or "
            "drop them by zero_grad()"
        )
    if plan.configs != tables.plan.configs or plan.copied != tables.plan.copied:
        raise PlanError("the plan has other tables or other copies than these tables")
    if tables.optimizer is not None:
        check_rule(tables.optimizer.rule, plan)


def moved(tables: Collection, make: Callable[[], Client]) -> Client:
    """Makes a collection at its new places, with the rows and their state, bit by bit. Blocks.

    Each server of the new plan takes the rows that it holds from the servers of the old one.

    Args:
        tables: The collection as it is.
        make: Returns the client of the collection at its new places, which it makes there.

    Returns:
        The new client. If it fails, the collection is as it was.

    Raises:
        CapacityError: A server of the new plan has too few rows for the ids that belong there.
    """
    client, opened = tables.client, list[Client]()

    def open_new() -> None:
        opened.append(make())
        if tables.optimizer is not None:
            opened[0].call_all("set_rule", tables.optimizer.rule)

    def move() -> None:
        _standing(client, may_wait=False)
        entries = client.call_all("offer")
        pieces = [held.piece for held in pieces_of(tables.plan.layout)]
        rows = [(piece.plain(), entries[piece.server].pop(0)) for piece in pieces]
        opened[0].call_all("adopt", [rows], secrets.token_hex(8), client.timeout_s)
        _check_moved(client, opened[0])

    try:
        agreed(client, open_new, "re-shard")
        agreed(client, move if client.trainer == 0 else None, "re-shard")
    except BaseException:
        for each in opened:
            with contextlib.suppress(WeftError):
                each.close()
        raise
    return opened[0]


def _check_moved(old: Client, new: Client) -> None:
    """Checks that all dynamic ids have moved: a server leaves out those that it has no rows for."""
    before, after = occupancy(old), occupancy(new)
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


def occupancy(client: Client) -> dict[str, Occupancy]:
    """Returns the sums over servers, by dynamic table. Blocks."""
    found: dict[str, list[Occupancy]] = {}
    for by_table in client.call_all("occupancy").values():
        for name, own in by_table.items():
            found.setdefault(name, []).append(own)
    return {
        name: Occupancy(*(sum(each) for each in zip(*parts, strict=True)))
        for name, parts in found.items()
    }


def agreed(client: Client, action: Callable[[], T] | None, doing: str) -> T | None:
    """Does this trainer's part of something; raises if any trainer could not. Blocks.

    Args:
        client: That of the collection.
        action: The part of this trainer, if it has one.
        doing: What is done, for messages.

    Returns:
        What the action of the first trainer has returned.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = None if action is None else action()
    except Exception as error:
        failure = error
    problem = "" if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = rpc.all_gather((value, problem), client.trainers, timeout=client.timeout_s)
    if failure is not None:
        raise failure
    for trainer, (_, theirs) in outcomes.items():
        if theirs:
            raise ConfigurationError(
                f"trainer {trainer!r} could not {doing} {client.name!r}: {theirs}"
            )
    return outcomes[client.trainers[0]][0]


def check_rule(rule: Rule, plan: Plan) -> None:
    """Checks that the tables of a plan can have an optimizer.

    Raises:
        PlanError: A table is cut by column, and the optimizer needs whole rows.
        ArgumentTypeError: The rule is none.
    """
    check_type(rule, Rule, "rule", "a rule of torchweft.embedding, such as Adagrad(lr=0.1)")
    for stack in plan.layout.stacks:
        for member in stack.members:
            if rule.needs_whole_rows and len(member.columns) < member.config.dim:
                raise PlanError(
                    f"table {member.config.name!r} is cut by column, and "
                    f"{type(rule).__name__} needs whole rows; cut it by row, or use Adagrad",
                    table=member.config.name,
                )
