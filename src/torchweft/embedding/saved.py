"""A server's part of a snapshot: its pieces of tables, saved and restored as entries.

Each piece is an entry, with the optimizer's state beside its rows. When a snapshot is restored,
some server receives each saved piece. After that every server takes the rows that it needs from
the servers that received them. So the layout may be another one.

An *increment* has the rows that changed since an earlier snapshot, its *base*. A server knows by a
*mark* at which of its versions it had the rows of that snapshot. Restored are a full snapshot and
the increments that follow it, the *links* of a chain.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.embedding.dynamic import ALL, ROWS, WAITING, DynamicShard, overlaid
from torchweft.embedding.errors import StepError
from torchweft.embedding.host import Host, Mark, host_of
from torchweft.embedding.pieces import Cut, Held, Plain, common, from_plain, pieces_of, within
from torchweft.embedding.routing import server_of
from torchweft.embedding.shard import CHANGED
from torchweft.errors import BrokenChain
from torchweft.rpc import RRef, rpc_sync
from torchweft.rpc.current_call import check_types
from torchweft.rpc.health import info_of

_CHUNK_BYTES = 1 << 26
"""Rows that one message moves."""
_MARKS = 256
"""The snapshots that a server knows as bases."""
ALL_ROWS: Cut = (0, sys.maxsize, 1)


class Entry:
    """A piece of a table, in the form that snapshots save and restore.

    Args:
        read: Returns the content; an entry that receives a piece needs none.
    """

    def __init__(self, read: Callable[[], dict[str, Any]] = dict) -> None:
        self._read = read
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows, the optimizer's state beside them, and the steps of the table."""
        return self._read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the content of a snapshot until other servers have taken it."""
        self.content = state


# Functions that the worker calls which saves or restores; by name.


def standing(name: str) -> tuple[int, bool, str]:
    """Returns where a server stands between steps.

    Returns:
        The version; whether no pushes wait for those of other trainers; and the optimizer with its
        settings, or nothing.
    """
    host = host_of(name)
    with host.settled():
        rule = "" if host.rule is None else host.rule.settings()
        return host.steps.version, host.steps.is_between, rule


def leaving(name: str, version: int, mark: str, since: str | None) -> list[RRef[Entry]]:
    """Returns an entry for each piece of this server, whose content is that of a version.

    Args:
        name: The collection.
        version: The version.
        mark: Mark of the new snapshot.
        since: Mark of its base; None for all rows.

    Raises:
        BrokenChain: The rows here do not come from the base.
        StepError: A step was applied since the caller asked for the version.
    """
    check_types(mark=(mark, str), version=(version, int))
    host = host_of(name)
    with host.settled():
        base = None if since is None else host.marks.get(since)
        if since is not None and base is None:
            raise BrokenChain(
                f"the rows of {name!r} on server {host.name!r} do not come from it",
                worker=host.name,
            )
        _check_version(host, version)
        _set_mark(host, mark)
    return [RRef(Entry(_reader(host, held, version, base))) for held in _held_by(host)]


def _set_mark(host: Host, mark: str) -> None:
    steps = {number: float(shard.steps[0]) for number, shard in host.shards.items()}
    host.marks[mark] = Mark(host.steps.version, steps)
    while len(host.marks) > _MARKS:
        del host.marks[next(iter(host.marks))]


def offering(name: str) -> list[RRef[Entry]]:
    """Returns an entry for each piece of this server, with the rows themselves, for other servers.

    No trainer makes a step until they are taken.

    Raises:
        StepError: A push waits for those of other trainers.
    """
    host = host_of(name)
    with host.settled():
        if not host.steps.is_between:
            raise StepError(
                f"server {host.name!r} is in the middle of step {host.steps.version} of {name!r}; "
                "all trainers re-shard between the same two steps",
                server=host.name,
                step=host.steps.version,
                expected=host.steps.version,
            )
        entries = []
        for held in _held_by(host):
            entry, shard = Entry(), host.shards[held.stack]
            is_dynamic = isinstance(shard, DynamicShard)
            tensors = shard.copied(held.member) if is_dynamic else shard.held(held.member)
            entry.content = {"tensors": tensors, "steps": float(_steps(host, held))}
            entries.append(RRef(entry))
    return entries


def receiving(name: str, count: int) -> list[RRef[Entry]]:
    """Returns entries that take up pieces of a snapshot."""
    check_types(count=(count, int))
    host_of(name)
    return [RRef(Entry()) for _ in range(count)]


def adopt(
    name: str, links: Sequence[Sequence[tuple[Plain, RRef[Entry]]]], mark: str, timeout_s: float
) -> None:
    """Sets this server's rows and their state to those of a snapshot, which servers received.

    Args:
        name: The collection.
        links: The pieces of a full snapshot, and of the increments that follow it.
        mark: The mark of the last one.
        timeout_s: Limit of each call.
    """
    host = host_of(name)
    with host.settled():
        host.marks.clear()  # From here on, these are no snapshot's rows.
    for held in _held_by(host):
        own = [[each for each in link if each[0][0] == held.piece.table] for link in links]
        shard = host.shards[held.stack]
        if isinstance(shard, DynamicShard):
            ids = [[entry for _, entry in link] for link in own]
            _adopt_ids(host, shard, ids, timeout_s)
            continue
        for number, link in enumerate(own):
            for plain, entry in link:
                function = _adopt_changed if number else _adopt
                function(host, held, plain, entry, timeout_s)
    with host.settled():
        for shard in host.shards.values():
            shard.changed.fill_(host.steps.version)
        _set_mark(host, mark)


def taken(entry: RRef[Entry], rows: Cut, columns: Cut, width: int) -> dict[str, Any]:
    """Returns some rows and columns of an entry that this server received."""
    content = _received(entry).content
    tensors = {key: _cut(each, rows, columns, width) for key, each in content["tensors"].items()}
    return {"tensors": tensors, "steps": content["steps"]}


def taken_changed(
    entry: RRef[Entry], rows: Cut, columns: Cut, width: int, begin: int
) -> tuple[bool, float, Tensor, dict[str, Tensor]]:
    """Returns those of some rows that an increment has, which this server received.

    Args:
        entry: The entry.
        rows: The rows, as positions in the piece.
        columns: The columns.
        width: Number of columns of the piece.
        begin: How many of these rows the caller has already.

    Returns:
        Whether there are more; the steps of the table; positions among the rows; tensors by name.
    """
    content = _received(entry).content
    tensors = dict(content["tensors"])
    changed = tensors.pop(CHANGED)
    start, stop, step = rows
    is_wanted = (changed >= start) & (changed < stop) & ((changed - start) % step == 0)
    own = is_wanted.nonzero().view(-1)
    row_bytes = sum(math.prod(each.shape[1:]) * each.itemsize for each in tensors.values())
    end = begin + max(1, _CHUNK_BYTES // row_bytes)
    chosen = own[begin:end]
    found = {key: _cut(each, ALL_ROWS, columns, width)[chosen] for key, each in tensors.items()}
    return end < len(own), content["steps"], (changed[chosen] - start) // step, found


def taken_ids(
    entry: RRef[Entry], prefix: str, servers: int, server: int, begin: int
) -> tuple[bool, float, dict[str, Tensor]]:
    """Returns ids and rows, of an entry that this server received, which belong on a server.

    Args:
        entry: The entry.
        prefix: How the names of the wanted tensors begin.
        servers: Number of servers that the table has now.
        server: Position of the server among them.
        begin: How many of these ids it has already.

    Returns:
        Whether there are more; the steps of the table; and tensors by name.
    """
    content = _received(entry).content
    group = {key: each for key, each in content["tensors"].items() if key.startswith(prefix)}
    own = (server_of(group[f"{prefix}ids"], servers) == server).nonzero().view(-1)
    row_bytes = sum(math.prod(each.shape[1:]) * each.itemsize for each in group.values())
    end = begin + max(1, _CHUNK_BYTES // row_bytes)
    tensors = {key: each[own[begin:end]] for key, each in group.items()}
    return end < len(own), content["steps"], tensors


CALLABLES = (adopt, leaving, offering, receiving, standing, taken, taken_changed, taken_ids)


def _received(reference: RRef[Entry]) -> Entry:
    entry = reference.local_value()
    check_types(entry=(entry, Entry))
    return entry


def _held_by(host: Host) -> list[Held]:
    return [each for each in pieces_of(host.options.layout) if each.piece.server == host.name]


def _reader(
    host: Host, held: Held, version: int, since: Mark | None
) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        with host.settled():
            _check_version(host, version)
            # Copied under the lock: later pushes change these rows.
            return _content(host, held, since)

    return read


def _check_version(host: Host, version: int) -> None:
    # With a bound, a push that waits is of a trainer that may have gone on.
    is_ahead = bool(host.options.staleness) and not host.steps.is_between
    if host.steps.version != version or is_ahead:
        raise StepError(
            f"server {host.name!r} is at version {host.steps.version}, and the snapshot is "
            f"of version {version}: a trainer has pushed while it was taken; have all "
            "trainers wait until it is saved",
            server=host.name,
            step=version,
            expected=host.steps.version,
        )


def _content(host: Host, held: Held, since: Mark | None) -> dict[str, Any]:
    shard = host.shards[held.stack]
    if since is None:
        tensors = shard.copied(held.member)
    else:
        tensors = shard.copied_since(held.member, since.version, since.steps[held.stack])
    return {"tensors": tensors, "steps": float(_steps(host, held))}


def _tensors(host: Host, held: Held) -> Mapping[str, Tensor]:
    return host.shards[held.stack].held(held.member)


def _steps(host: Host, held: Held) -> Tensor:
    return host.shards[held.stack].steps[held.member]


def _adopt(host: Host, held: Held, plain: Plain, entry: RRef[Entry], timeout_s: float) -> None:
    target, source = held.piece, from_plain(plain)
    rows = common(target.rows, source.rows)
    columns = common(target.columns, source.columns)
    if not columns:
        return
    for part in _chunks(rows, sum(each[0].nbytes for each in _tensors(host, held).values())):
        wanted = within(part, source.rows), within(columns, source.columns), len(source.columns)
        found = _asked(taken, entry, wanted, timeout_s)
        own = within(part, target.rows), within(columns, target.columns), len(target.columns)
        with host.settled():
            for key, tensor in _tensors(host, held).items():
                _cut(tensor, *own).copy_(found["tensors"][key])
            _steps(host, held).fill_(found["steps"])


def _adopt_changed(
    host: Host, held: Held, plain: Plain, entry: RRef[Entry], timeout_s: float
) -> None:
    target, source = held.piece, from_plain(plain)
    rows = common(target.rows, source.rows)
    columns = common(target.columns, source.columns)
    if not columns or not rows:
        return
    wanted = within(rows, source.rows), within(columns, source.columns), len(source.columns)
    start, _, step = within(rows, target.rows)
    own = within(columns, target.columns), len(target.columns)
    begin, has_more = 0, True
    while has_more:
        has_more, steps, found, values = _asked(taken_changed, entry, (*wanted, begin), timeout_s)
        begin += len(found)
        with host.settled():
            for key, tensor in _tensors(host, held).items():
                _cut(tensor, ALL_ROWS, *own)[found * step + start] = values[key]
            _steps(host, held).fill_(steps)


def _adopt_ids(
    host: Host, shard: DynamicShard, links: Sequence[Sequence[RRef[Entry]]], timeout_s: float
) -> None:
    content: dict[str, Tensor] = {}
    for number, entries in enumerate(links):
        prefixes = [ROWS, WAITING]
        if number:
            prefixes += [ALL + ROWS, ALL + WAITING]
        steps, found = _ids_of(host, shard, entries, prefixes, timeout_s)
        content = overlaid(content, found) if number else found
    with host.settled():
        shard.replace(content, steps)


def _ids_of(
    host: Host,
    shard: DynamicShard,
    entries: Sequence[RRef[Entry]],
    prefixes: Sequence[str],
    timeout_s: float,
) -> tuple[float, dict[str, Tensor]]:
    """Returns the steps of a table, and tensors of those of its ids that belong here."""
    servers = shard.stack.servers
    parts: dict[str, list[Tensor]] = {}
    for entry in entries:
        for prefix in prefixes:
            begin, has_more = 0, True
            while has_more:
                wanted = prefix, len(servers), servers.index(host.name), begin
                has_more, steps, found = _asked(taken_ids, entry, wanted, timeout_s)
                begin += len(found[f"{prefix}ids"])
                for key, each in found.items():
                    parts.setdefault(key, []).append(each)
    return steps, {key: torch.cat(each) for key, each in parts.items()}


def _asked(function: Any, entry: RRef[Entry], given: tuple[Any, ...], timeout_s: float) -> Any:
    """Returns the answer of the owner of an entry."""
    if entry.is_owner():
        return function(entry, *given)
    return rpc_sync(info_of(entry.id.owner), function, (entry, *given), timeout=timeout_s)


def _chunks(rows: range, row_bytes: int) -> Iterator[range]:
    count = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


def _cut(tensor: Tensor, rows: Cut, columns: Cut, width: int) -> Tensor:
    """Returns rows, and columns if the tensor has them: some state is one value for each row."""
    found = tensor[slice(*rows)]
    return found[:, slice(*columns)] if tensor.shape[1] == width else found
