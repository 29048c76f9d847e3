"""Which rows of which servers the ids of a stack stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.embedding.initial import mixed, shifted
from torchweft.embedding.inputs import Flat
from torchweft.embedding.plan import Member, Stack
from torchweft.embedding.rows import Sorted, sort
from torchweft.embedding.wire import Wire, row_bytes

_SERVER_BITS: Final = 33
_LARGEST: Final = torch.iinfo(torch.int32).max
_MARKS_PER_KEY: Final = 32
"""Up to so many rows for each id, different ids are counted by marks in a third of the time."""


class Ordered(NamedTuple):
    """Rows, each once, in the order of servers.

    Attributes:
        keys: The keys in order; of a dynamic table its ids, in the order of servers and ids.
        cuts: Where in the keys each server's begin, and their number at the end.
        counts: How many rows of each member there are, by its number.
    """

    keys: Sorted
    cuts: list[int]
    counts: list[int]


class Routed:
    """The rows that a lookup needs.

    Args:
        found: The key of each id.
        order: Orders keys.
        count: Returns how many different keys each member has, if that is faster than ordering.
    """

    def __init__(
        self,
        found: Tensor,
        order: Callable[[Tensor], Ordered],
        count: Callable[[Tensor], list[int] | None] = lambda _: None,
    ) -> None:
        self.found = found
        self._order = order
        self._count = count

    @functools.cached_property
    def ordered(self) -> Ordered:
        """The rows, each once; sorted when they are first needed."""
        return self._order(self.found)

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many rows of each member there are, by its number."""
        return self._count(self.found) or self.ordered.counts


def server_of(ids: Tensor, servers: int) -> Tensor:
    """Returns which of some servers has each id of a dynamic table.

    Snapshots and servers of several versions rely on it: it does not change.
    """
    return shifted(mixed(ids), _SERVER_BITS).remainder_(servers)


def make_router(stack: Stack, wire: Wire) -> Router:
    """Returns what routes the ids of a stack; see ``Router``."""
    return DynamicRouter(stack, wire) if stack.is_dynamic else Router(stack, wire)


class Router:
    """Routes the ids of one stack.

    Args:
        stack: The stack.
        wire: The form of its values in messages.
    """

    def __init__(self, stack: Stack, wire: Wire = Wire()) -> None:  # noqa: B008  # immutable
        self.stack = stack
        self.pulled_bytes = row_bytes(wire.pulled, stack.dim, stack.dtype)
        """The size of a row in a pull."""
        self.pushed_bytes = row_bytes(wire.pushed, stack.dim, stack.dtype)
        """The size of a row's gradient in a push."""
        held = [
            (server, number, member.base)
            for server in range(len(stack.servers))
            for number, member in sorted(stack.held_on(server), key=lambda each: each[1].base)
        ]
        self.dtype = torch.int32 if stack.stride <= _LARGEST else torch.int64
        """The type of the rows in messages."""
        self._members = [number for _, number, _ in held]
        self._servers = [server for server, _, _ in held]
        begins = [server * stack.stride + base for server, _, base in held]
        end = len(stack.servers) * stack.stride
        # Sorting takes half the time in the smaller type.
        dtype = torch.int32 if end <= _LARGEST else torch.int64
        self._edges = torch.tensor([*begins, end], dtype=dtype, device="cpu")
        self._bounds = [*begins, end]

    def keys(self, member: Member, ids: Tensor) -> Tensor:
        """Returns the key of each id of a table."""
        stack = self.stack
        if stack.stripes == 1:
            return ids + (member.server * stack.stride + member.base)
        servers = ids.remainder(stack.stripes)
        rows = ids.div(stack.stripes, rounding_mode="floor")
        return servers.mul_(stack.stride).add_(rows).add_(member.base)

    def route(self, flats: Iterable[tuple[Member, Flat]]) -> Routed:
        """Returns the rows that ids of some tables stand for."""
        found = torch.cat([self.keys(member, flat.ids) for member, flat in flats])
        return Routed(found.to(self._edges.dtype), self._ordered, self._marked)

    def _ordered(self, found: Tensor) -> Ordered:
        keys = sort(found)
        return Ordered(keys, *self.counted(keys.unique))

    def _marked(self, found: Tensor) -> list[int] | None:
        """Returns how many different keys each member has; None if there are few keys of many."""
        size = self._bounds[-1]
        if size > _MARKS_PER_KEY * found.shape[0]:
            return None
        marks = np.zeros(size, np.bool_)
        marks[found.numpy()] = True
        counts = [0] * len(self.stack.members)
        for member, begin, end in zip(self._members, self._bounds, self._bounds[1:], strict=False):
            counts[member] += int(np.count_nonzero(marks[begin:end]))
        return counts

    def counted(self, keys: Tensor) -> tuple[list[int], list[int]]:
        """Returns where in rising keys each server's begin; and how many each member has."""
        ends = torch.searchsorted(keys, self._edges).tolist()
        counts = [0] * len(self.stack.members)
        cuts = [0] * (len(self.stack.servers) + 1)
        for place, (server, member) in enumerate(zip(self._servers, self._members, strict=True)):
            counts[member] += ends[place + 1] - ends[place]
            cuts[server + 1] = ends[place + 1]
        return cuts, counts

    def rows(self, keys: Tensor, server: int) -> Tensor:
        """Returns the rows of a server's tensor, from keys that are all on that server."""
        return (keys - server * self.stack.stride).to(self.dtype)


class DynamicRouter(Router):
    """Routes the ids of a dynamic table, which are its rows in messages and its keys."""

    def __init__(self, stack: Stack, wire: Wire) -> None:
        super().__init__(stack, wire)
        self.dtype = torch.int64

    def keys(self, member: Member, ids: Tensor) -> Tensor:
        """Returns the ids."""
        return ids

    def route(self, flats: Iterable[tuple[Member, Flat]]) -> Routed:
        """Returns the rows that ids of the table stand for."""
        return Routed(torch.cat([flat.ids for _, flat in flats]), self._ordered)

    def _ordered(self, found: Tensor) -> Ordered:
        by_id = sort(found)
        servers = len(self.stack.servers)
        if servers == 1:
            return Ordered(by_id, [0, len(by_id.unique)], [len(by_id.unique)])
        unique, order = torch.sort(server_of(by_id.unique, servers), stable=True)
        lengths = torch.diff(by_id.starts, append=by_id.starts.new_tensor([len(found)]))[order]
        starts = lengths.cumsum(0).sub_(lengths)
        # The occurrences of each id stay together, and in their order.
        places = torch.arange(len(found), device="cpu") + (
            by_id.starts[order] - starts
        ).repeat_interleave(lengths, output_size=len(found))
        keys = Sorted(by_id.unique[order], by_id.order[places], starts)
        cuts = torch.searchsorted(unique, torch.arange(servers + 1, device="cpu")).tolist()
        return Ordered(keys, cuts, [len(unique)])

    def rows(self, keys: Tensor, server: int) -> Tensor:
        """Returns the ids."""
        return keys
