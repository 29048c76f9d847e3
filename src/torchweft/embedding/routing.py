"""Which rows of which servers the ids of a stack stand for.

Where servers pool, the order of the keys is needed for the push alone: it is computed while they
answer the pull, or never. Before that, different keys are counted by marks, one for each row of the
stack, if these are few beside the ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.embedding.initial import mixed, shifted
from torchweft.embedding.inputs import Flat
from torchweft.embedding.plan import Member, Stack
from torchweft.embedding.rows import Sorted, distinct, sort
from torchweft.embedding.wire import Wire, row_bytes

_SERVER_BITS: Final = 33
_LARGEST: Final = torch.iinfo(torch.int32).max
_MARKS_PER_KEY: Final = 32
"""Up to so many rows for each id, different ids are counted by marks: faster than by a sort."""
_FIRST_LOOK: Final = 3
"""How many ids are looked at first, for each that must differ."""


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


class Distinct(NamedTuple):
    """``Ordered``, with ``keys`` that are each key once, without the order of all of them."""

    keys: Tensor
    cuts: list[int]
    counts: list[int]


class Span(NamedTuple):
    """Which keys of a lookup are of a member: those from ``begin`` to ``end``."""

    member: int
    begin: int
    end: int


class Routed:
    """The rows that a lookup needs. Everything but the keys is computed when it is first needed.

    Args:
        router: Its router.
        found: The key of each id.
        spans: Which keys are of which member.
    """

    def __init__(self, router: Router, found: Tensor, spans: Sequence[Span]) -> None:
        self.found = found
        self._router = router
        self._spans = spans

    @functools.cached_property
    def ordered(self) -> Ordered:
        """The rows, each once, and the order of the keys: sorts."""
        return self._router.ordered(self.found)

    @functools.cached_property
    def distinct(self) -> Distinct:
        """The rows, each once, without the order of the keys: in half of the time."""
        return self._router.distinct(self)

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many rows of each member there are, by its number."""
        if "distinct" in vars(self):
            return self.distinct.counts
        marks = self._marks()
        if marks is None:
            return self.ordered.counts
        marks[self.found.long().numpy()] = True
        return self._router.counted_marks(marks)

    def beyond(self, limits: Mapping[int, int]) -> set[int]:
        """Returns the members that have more rows than a limit, by their numbers.

        Only as many ids are looked at as it takes, which often is a part of them.
        """
        marks = self._marks()
        if marks is None:
            return {member for member, limit in limits.items() if self.counts[member] > limit}
        found: set[int] = set()
        left = {span: span.begin for span in self._spans if span.member in limits}
        looks = _FIRST_LOOK
        while left:
            for span, begin in left.items():
                left[span] = min(span.begin + looks * (limits[span.member] + 1), span.end)
                marks[self.found[begin : left[span]].long().numpy()] = True
            counts = self._router.counted_marks(marks)
            found.update(each.member for each in left if counts[each.member] > limits[each.member])
            left = {
                span: end
                for span, end in left.items()
                if span.member not in found and end < span.end
            }
            looks *= 2
        return found

    def _marks(self) -> Any:
        """Returns an array of False by key; None if sorted keys are counted."""
        return None if "ordered" in vars(self) else self._router.marks(self.found)


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
        self._marks: Any = None

    def keys(self, member: Member, ids: Tensor) -> Tensor:
        """Returns the key of each id of a table."""
        stack = self.stack
        if stack.stripes == 1:
            return ids + (member.server * stack.stride + member.base)
        servers = ids.remainder(stack.stripes)
        rows = ids.div(stack.stripes, rounding_mode="floor")
        return servers.mul_(stack.stride).add_(rows).add_(member.base)

    def route(self, flats: Iterable[tuple[int, Member, Flat]]) -> Routed:
        """Returns the rows that ids of some tables stand for.

        Args:
            flats: Number, table and ids of each member that is looked up.
        """
        given, spans, end = list(flats), [], 0
        for number, _, flat in given:
            spans.append(Span(number, end, end + flat.n_ids))
            end += flat.n_ids
        found = torch.empty(end, dtype=self._edges.dtype, device="cpu")
        into = found.numpy()
        for (_, begin, end), (_, member, flat) in zip(spans, given, strict=True):
            self._put_keys(into[begin:end], member, flat.ids)
        return Routed(self, found, spans)

    def _put_keys(self, into: Any, member: Member, ids: Tensor) -> None:
        stack = self.stack
        if stack.stripes > 1:
            into[:] = self.keys(member, ids).numpy()
            return
        # The ids are in range: they fit in the smaller type of the keys.
        into[:] = ids.numpy()
        into += member.server * stack.stride + member.base

    def ordered(self, found: Tensor) -> Ordered:
        """Returns keys in their order."""
        keys = sort(found)
        return Ordered(keys, *self.counted(keys.unique))

    def distinct(self, routed: Routed) -> Distinct:
        """Returns the keys of a lookup, each once."""
        keys = distinct(routed.found)
        return Distinct(keys, *self.counted(keys))

    def marks(self, found: Tensor) -> Any:
        """Returns an array of False by key, valid until the next one; None for few of many keys."""
        size = self._bounds[-1]
        if size > _MARKS_PER_KEY * found.shape[0]:
            return None
        if self._marks is None:
            self._marks = np.zeros(size, np.bool_)
        else:
            self._marks.fill(False)
        return self._marks

    def counted_marks(self, marks: Any) -> list[int]:
        """Returns how many keys of each member are marked."""
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
        """Returns the rows of a server's tensor, from keys that are all on that server.

        They may be the keys themselves.
        """
        return (keys - server * self.stack.stride if server else keys).to(self.dtype)


class DynamicRouter(Router):
    """Routes the ids of a dynamic table, which are its rows in messages and its keys."""

    def __init__(self, stack: Stack, wire: Wire) -> None:
        super().__init__(stack, wire)
        self.dtype = torch.int64

    def keys(self, member: Member, ids: Tensor) -> Tensor:
        """Returns the ids."""
        return ids

    def route(self, flats: Iterable[tuple[int, Member, Flat]]) -> Routed:
        """Returns the rows that ids of the table stand for."""
        ((number, _, flat),) = flats
        return Routed(self, flat.ids, [Span(number, 0, flat.n_ids)])

    def distinct(self, routed: Routed) -> Distinct:
        """Returns the keys of a lookup, each once."""
        keys, cuts, counts = routed.ordered
        return Distinct(keys.unique, cuts, counts)

    def marks(self, found: Tensor) -> None:
        """Returns None: there are as many keys as numbers of 64 bits."""

    def ordered(self, found: Tensor) -> Ordered:
        """Returns keys in the order of servers and ids."""
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
