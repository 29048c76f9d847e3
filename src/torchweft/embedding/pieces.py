"""The pieces of tables on one server: read and set, saved and restored, moved to other servers.

Each piece is an entry of a snapshot, with the optimizer's state beside its rows. When a snapshot is
restored, some server receives each saved piece. After that every server takes the rows that it
needs from the servers that received them. So the layout may be another one.

An *increment* has the rows that changed since an earlier snapshot, its *base*. A server knows by a
*mark* at which of its versions it had the rows of that snapshot. Restored are a full snapshot and
the increments that follow it, the *links* of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from torchweft.embedding.dynamic import (
    server_of,
)
from torchweft.embedding.layout import (
    Cut,
    Plain,
)
from torchweft.embedding.shard import CHANGED
from torchweft.extending import check_types
from torchweft.rpc import RRef, expose

_CHUNK_BYTES = 1 << 26
"""Rows that one message moves."""
PLACES: Final = "places"

Taken = tuple[bool, float, dict[str, Tensor]]
"""Whether there is more; the steps of the table; and tensors with equally many rows, by name."""


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

    @expose
    def take(self, rows: Cut, columns: Cut, width: int, begin: int) -> Taken:
        """Returns some rows and columns, with their places among these rows.

        Args:
            rows: The rows, as positions in the piece; of an increment, those that it has.
            columns: The columns.
            width: Number of columns of the piece.
            begin: How many of these rows the caller has already.
        """
        tensors = dict(self.content["tensors"])
        changed, (start, stop, step) = tensors.pop(CHANGED, None), rows
        if changed is None:
            own = positions = torch.arange(start, stop, step, device="cpu")
        else:
            is_wanted = (changed >= start) & (changed < stop) & ((changed - start) % step == 0)
            own = is_wanted.nonzero().view(-1)
            positions = changed[own]
        chosen = _chunk(tensors, begin)
        found = {key: cut(each, columns, width)[own[chosen]] for key, each in tensors.items()}
        found[PLACES] = (positions[chosen] - start) // step
        return chosen.stop < len(own), self.content["steps"], found

    @expose
    def take_ids(self, prefix: str, servers: int, server: int, begin: int) -> Taken:
        """Returns ids of a dynamic table which belong on a server, with their rows.

        Args:
            prefix: How the names of the wanted tensors begin.
            servers: Number of servers that the table has now.
            server: Position of the server among them.
            begin: How many of these ids it has already.
        """
        tensors = self.content["tensors"]
        group = {key: each for key, each in tensors.items() if key.startswith(prefix)}
        own = (server_of(group[f"{prefix}ids"], servers) == server).nonzero().view(-1)
        chosen = _chunk(group, begin)
        found = {key: each[own[chosen]] for key, each in group.items()}
        return chosen.stop < len(own), self.content["steps"], found


Link = Sequence[tuple[Plain, RRef[Entry]]]
"""The pieces of a snapshot, and the entries that received them."""


def asked(
    entry: RRef[Entry], method: str, wanted: tuple[Any, ...], timeout_s: float
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yields what an entry has of the wanted rows, in chunks; at least one."""
    found: Any = entry.local_value() if entry.is_owner() else entry.rpc_sync(timeout_s)
    if entry.is_owner():
        check_types(entry=(found, Entry))
    begin, has_more = 0, True
    while has_more:
        has_more, steps, tensors = getattr(found, method)(*wanted, begin)
        begin += len(next(iter(tensors.values())))
        yield steps, tensors


def _chunk(tensors: dict[str, Tensor], begin: int) -> slice:
    """Returns which rows, from a first one on, are sent in one message."""
    row_bytes = sum(math.prod(each.shape[1:]) * each.itemsize for each in tensors.values())
    return slice(begin, begin + max(1, _CHUNK_BYTES // row_bytes))


def cut(tensor: Tensor, columns: Cut, width: int) -> Tensor:
    """Returns columns, if the tensor has them: some state is one value for each row."""
    return tensor[:, slice(*columns)] if tensor.shape[1] == width else tensor
