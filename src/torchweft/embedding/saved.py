"""A server's part of a snapshot: its pieces of tables, saved and restored as entries.

Each piece is an entry, with the optimizer's state beside its rows. When a snapshot is restored,
some server receives each saved piece. After that every server takes the rows that it needs from
the servers that received them. So the layout may be another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.embedding.dynamic import ROWS, WAITING, DynamicShard
from torchweft.embedding.errors import StepError
from torchweft.embedding.host import Host, host_of
from torchweft.embedding.pieces import Cut, Held, Plain, common, from_plain, pieces_of, within
from torchweft.embedding.routing import server_of
from torchweft.rpc import RRef, rpc_sync
from torchweft.rpc.current_call import check_types

_CHUNK_BYTES = 1 << 26
"""Rows that one message moves."""


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


def standing(name: str) -> tuple[int, bool, list[str]]:
    """Returns where a server stands between steps.

    Returns:
        The version; whether pushes wait for those of other trainers; and the optimizer: its name,
        and those of its state, or nothing.
    """
    host = host_of(name)
    with host.lock:
        rule = host.rule
        described = (
            []
            if rule is None
            else [type(rule).__name__, *rule.state_for(torch.empty(0, 1, device="cpu"))]
        )
        return host.steps.version, host.steps.is_between, described


def leaving(name: str, version: int) -> list[RRef[Entry]]:
    """Returns an entry for each piece of this server, whose content is that of a version."""
    host = host_of(name)
    return [RRef(Entry(_reader(host, held, version))) for held in _held_by(host)]


def receiving(name: str, count: int) -> list[RRef[Entry]]:
    """Returns entries that take up pieces of a snapshot."""
    check_types(count=(count, int))
    host_of(name)
    return [RRef(Entry()) for _ in range(count)]


def adopt(name: str, saved: Sequence[tuple[Plain, RRef[Entry]]], timeout_s: float) -> None:
    """Sets this server's rows and their state to those of a snapshot, which servers received."""
    host = host_of(name)
    for held in _held_by(host):
        own = [each for each in saved if each[0][0] == held.piece.table]
        shard = host.shards[held.stack]
        if isinstance(shard, DynamicShard):
            _adopt_ids(host, shard, [entry for _, entry in own], timeout_s)
            continue
        for plain, entry in own:
            _adopt(host, held, plain, entry, timeout_s)


def taken(entry: RRef[Entry], rows: Cut, columns: Cut, width: int) -> dict[str, Any]:
    """Returns some rows and columns of an entry that this server received."""
    content = _received(entry).content
    tensors = {key: _cut(each, rows, columns, width) for key, each in content["tensors"].items()}
    return {"tensors": tensors, "steps": content["steps"]}


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


CALLABLES = (adopt, leaving, receiving, standing, taken, taken_ids)


def _received(reference: RRef[Entry]) -> Entry:
    entry = reference.local_value()
    check_types(entry=(entry, Entry))
    return entry


def _held_by(host: Host) -> list[Held]:
    return [each for each in pieces_of(host.options.layout) if each.piece.server == host.name]


def _reader(host: Host, held: Held, version: int) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        with host.lock:
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
            # Copied under the lock: later pushes change these rows.
            tensors = host.shards[held.stack].copied(held.member)
            return {"tensors": tensors, "steps": float(_steps(host, held))}

    return read


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
        found = (
            taken(entry, *wanted)
            if entry.is_owner()
            else rpc_sync(entry.owner(), taken, (entry, *wanted), timeout=timeout_s)
        )
        own = within(part, target.rows), within(columns, target.columns), len(target.columns)
        with host.lock:
            for key, tensor in _tensors(host, held).items():
                _cut(tensor, *own).copy_(found["tensors"][key])
            _steps(host, held).fill_(found["steps"])


def _adopt_ids(
    host: Host, shard: DynamicShard, entries: Sequence[RRef[Entry]], timeout_s: float
) -> None:
    servers = shard.stack.servers
    parts: dict[str, list[Tensor]] = {}
    for entry in entries:
        for prefix in (ROWS, WAITING):
            begin, has_more = 0, True
            while has_more:
                wanted = (entry, prefix, len(servers), servers.index(host.name), begin)
                has_more, steps, found = (
                    taken_ids(*wanted)
                    if entry.is_owner()
                    else rpc_sync(entry.owner(), taken_ids, wanted, timeout=timeout_s)
                )
                begin += len(found[f"{prefix}ids"])
                for key, each in found.items():
                    parts.setdefault(key, []).append(each)
    with host.lock:
        shard.replace({key: torch.cat(each) for key, each in parts.items()}, steps)


def _chunks(rows: range, row_bytes: int) -> Iterator[range]:
    count = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


def _cut(tensor: Tensor, rows: Cut, columns: Cut, width: int) -> Tensor:
    """Returns rows, and columns if the tensor has them: some state is one value for each row."""
    found = tensor[slice(*rows)]
    return found[:, slice(*columns)] if tensor.shape[1] == width else found
