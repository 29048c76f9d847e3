"""What one lookup requests of one stack: rows or sums of bags, whichever are fewer bytes.

A key numbers the rows of a stack; see ``layout``. Where servers pool, the order of the keys is
needed for the push alone: it is computed while they answer the pull, or never.

The values are a leaf of the trainer's graph. The gradient of the leaf, in slices, is the push.
"""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.embedding.cache import RowCache
from torchweft.embedding.dynamic import server_of
from torchweft.embedding.inputs import Flat
from torchweft.embedding.layout import Member, Stack
from torchweft.embedding.rows import (
    Bags,
    Entries,
    Sorted,
    Wire,
    distinct,
    pool,
    pooled,
    row_bytes,
    sort,
)

_LARGEST: Final = torch.iinfo(torch.int32).max
_FIRST_LOOK: Final = 3
"""How many ids are looked at first, for each that must differ."""

Message = tuple[Any, ...]
"""A request to one server."""


class TableIds(NamedTuple):
    """A table of a stack that is looked up.

    Attributes:
        number: Its number in the stack.
        member: The table.
        flat: The ids.
    """

    number: int
    member: Member
    flat: Flat


@dataclass
class Traffic:
    """What lookups of one table moved.

    Attributes:
        ids: Ids that were looked up.
        rows: Rows that lookups needed, each once for each lookup.
        pulled_bytes: Size of ids, rows and sums in pulls.
        pushed_bytes: The same in pushes.
        hits: How many of the rows the cache had, so that they were not pulled.
        staleness: How often each staleness was observed, of a trainer: with a bound in steps, at
            each lookup; in the asynchronous mode in pushes, at each push. Of several servers it is
            that of the one with the oldest rows.
    """

    ids: int = 0
    rows: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    hits: int = 0
    staleness: dict[int, int] = field(default_factory=dict, compare=False)

    def note_staleness(self, staleness: int) -> None:
        """Counts a staleness."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1


# Keys


class Router:
    """Routes the ids of one stack to rows of its servers.

    Args:
        stack: The stack.
        wire: The form of its values in messages.
    """

    def __init__(self, stack: Stack, wire: Wire = Wire()) -> None:  # noqa: B008  # immutable
        self.stack = stack
        self.is_dynamic = stack.is_dynamic
        self.pulled_bytes = row_bytes(wire.pulled, stack.dim, stack.dtype)
        """The size of a row in a pull."""
        self.pushed_bytes = row_bytes(wire.pushed, stack.dim, stack.dtype)
        """The size of a row's gradient in a push."""
        self.dtype = torch.int32 if stack.stride <= _LARGEST else torch.int64
        """The type of the rows in messages."""
        self._held = [
            (server, number, server * stack.stride + member.base)
            for server in range(len(stack.servers))
            for number, member in sorted(stack.held_on(server), key=lambda each: each[1].base)
        ]
        self._bounds = [*(begin for _, _, begin in self._held), len(stack.servers) * stack.stride]
        # Sorting takes half the time in the smaller type.
        dtype = torch.int32 if self._bounds[-1] <= _LARGEST else torch.int64
        self._edges = torch.tensor(self._bounds, dtype=dtype, device="cpu")

    def keys(self, member: Member, ids: Tensor) -> Tensor:
        """Returns the key of each id of a table."""
        stack = self.stack
        if stack.stripes == 1:
            return ids + (member.server * stack.stride + member.base)
        servers = ids.remainder(stack.stripes)
        rows = ids.div(stack.stripes, rounding_mode="floor")
        return servers.mul_(stack.stride).add_(rows).add_(member.base)

    def route(self, tables: Sequence[TableIds]) -> Keys:
        """Returns the rows that ids of some tables stand for."""
        found = torch.empty(
            sum(each.flat.n_ids for each in tables), dtype=self._edges.dtype, device="cpu"
        )
        into, stack, begin = found.numpy(), self.stack, 0
        for _, member, flat in tables:
            own = into[begin : begin + flat.n_ids]
            begin += flat.n_ids
            if stack.stripes > 1:
                own[:] = self.keys(member, flat.ids).numpy()
            else:  # The ids are in range: they fit in the smaller type of the keys.
                own[:] = flat.ids.numpy()
                own += member.server * stack.stride + member.base
        return Keys(self, found, tables)

    def sorted(self, found: Tensor) -> Sorted:
        """Returns keys in their order."""
        return sort(found)

    def counted(self, keys: Tensor) -> tuple[list[int], list[int]]:
        """Returns where in rising keys each server's begin; and how many each member has."""
        ends = torch.searchsorted(keys, self._edges).tolist()
        counts = [0] * len(self.stack.members)
        cuts = [0] * (len(self.stack.servers) + 1)
        for place, (server, member, _) in enumerate(self._held):
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

    def route(self, tables: Sequence[TableIds]) -> Keys:
        """Returns the rows that ids of the table stand for."""
        return Keys(self, tables[0].flat.ids, tables)

    def sorted(self, found: Tensor) -> Sorted:
        """Returns keys in the order of servers and ids."""
        ordered, order = torch.sort(found, stable=True)
        if len(self.stack.servers) > 1:
            _, by_server = torch.sort(server_of(ordered, len(self.stack.servers)), stable=True)
            ordered, order = ordered[by_server], order[by_server]
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        return Sorted(unique, order, counts.cumsum(0).sub_(counts))

    def counted(self, keys: Tensor) -> tuple[list[int], list[int]]:
        """Returns where in ordered keys each server's begin; and how many there are."""
        servers = len(self.stack.servers)
        edges = torch.arange(servers + 1, device="cpu")
        return torch.searchsorted(server_of(keys, servers), edges).tolist(), [len(keys)]

    def rows(self, keys: Tensor, server: int) -> Tensor:
        """Returns the ids."""
        return keys


class Keys:
    """The rows that a lookup needs. Everything but the keys is computed when it is first needed.

    Args:
        router: Its router.
        of_ids: The key of each id.
        tables: The tables, whose keys follow one another.
    """

    def __init__(self, router: Router, of_ids: Tensor, tables: Sequence[TableIds]) -> None:
        self.of_ids = of_ids
        self._router = router
        self._tables = tables

    @functools.cached_property
    def order(self) -> Sorted:
        """The keys, each once, and the order of all: sorts."""
        return self._router.sorted(self.of_ids)

    @functools.cached_property
    def distinct(self) -> Tensor:
        """The keys, each once, in order: in half of the time of their ``order``."""
        if "order" in vars(self) or self._router.is_dynamic:
            return self.order.unique
        return distinct(self.of_ids)

    @functools.cached_property
    def _counted(self) -> tuple[list[int], list[int]]:
        return self._router.counted(self.distinct)

    @property
    def cuts(self) -> list[int]:
        """Where in the keys each server's begin, and their number at the end."""
        return self._counted[0]

    @property
    def counts(self) -> list[int]:
        """How many rows of each member there are, by its number."""
        return self._counted[1]

    def beyond(self, limits: Mapping[int, int]) -> set[int]:
        """Returns the members that have more rows than a limit, by their numbers.

        First some ids are looked at, which often are enough; then all of them.
        """
        found, begin = set(), 0
        for number, _, flat in self._tables:
            own, begin = self.of_ids[begin : begin + flat.n_ids], begin + flat.n_ids
            if number in limits:
                first = own[: _FIRST_LOOK * (limits[number] + 1)]
                if any(len(distinct(each)) > limits[number] for each in (first, own)):
                    found.add(number)
        return found


def make_router(stack: Stack, wire: Wire) -> Router:
    """Returns what routes the ids of a stack; see ``Router``."""
    return DynamicRouter(stack, wire) if stack.is_dynamic else Router(stack, wire)


# Requests


class StackRequest(abc.ABC):
    """What one lookup pulls of one stack, and pushes to it.

    Args:
        number: Number of the stack.
        router: Routes its ids.
        tables: The tables that are looked up.
        keys: The rows that they need.
    """

    def __init__(self, number: int, router: Router, tables: Sequence[TableIds], keys: Keys) -> None:
        self.number = number
        self.stack = router.stack
        self.tables = tables
        self.version = 0
        """The oldest version that a server's values are of."""
        self.versions: Mapping[str, int] = {}
        """The version of each server's values; none where a cache had some."""
        self.values = torch.empty(0, device="cpu")
        """The values, once they are here."""
        self.place = 0
        """Its position among all lookups of the collection."""
        self.is_noted = False
        self._router = router
        self._keys = keys
        self._leaf: Callable[[], Tensor | None] = lambda: None

    @property
    def used(self) -> int:
        """Bit i tells that member i is looked up."""
        return sum(1 << each.number for each in self.tables)

    def leaf(self) -> Tensor | None:
        """Returns the leaf while it is alive; this object does not keep it."""
        return self._leaf()

    def take_leaf(self, when_touched: Callable[[StackRequest], None]) -> Tensor:
        """Returns the values, as a leaf if gradients are enabled; this object drops them.

        Args:
            when_touched: Called once there is a first gradient of them.
        """
        values, self.values = self.values, torch.empty(0, device="cpu")
        if torch.is_grad_enabled():
            values.requires_grad_()
            values.weft_pulled = self  # type: ignore[attr-defined]  # found by the optimizer
            self._leaf = weakref.ref(values)
            values.register_hook(lambda _: when_touched(self))  # type: ignore[no-untyped-call]
        return values

    def arrive(self, versions: Mapping[str, int], answers: Mapping[str, Tensor], step: int) -> None:
        """Takes the version and the values of each server, for a step of the trainer."""
        self.versions = versions
        self.version = min(versions.values(), default=step)
        self.values = self.gather(answers)

    @abc.abstractmethod
    def requests(self) -> Mapping[str, Message]:
        """Returns what to ask of each server."""

    @abc.abstractmethod
    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the values, from the servers' answers."""

    @abc.abstractmethod
    def pushes(self, gradient: Tensor) -> Mapping[str, tuple[Any, ...]]:
        """Returns what to push to each server: rows and gradients, or those of bags."""

    @abc.abstractmethod
    def bytes_of(self, flat: Flat, rows: int) -> tuple[int, int]:
        """Returns what the pull of a table with so many rows moves, and the push."""

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sums of the bags of all tables."""
        return values

    def outputs(self, values: Tensor) -> list[tuple[Member, Tensor]]:
        """Returns the output of each table, ``(bags, dim)``."""
        parts = torch.split(self.sums(values), [each.flat.bags for each in self.tables])
        return [
            (each.member, averaged(each, part))
            for each, part in zip(self.tables, parts, strict=True)
        ]

    @functools.cached_property
    def moved(self) -> dict[str, Traffic]:
        """What the lookup moves by table, if its gradient is pushed."""
        found = {}
        for number, member, flat in self.tables:
            rows = self._keys.counts[number]
            found[member.config.name] = Traffic(flat.n_ids, rows, *self.bytes_of(flat, rows))
        return found

    @functools.cached_property
    def _joined(self) -> Flat:
        """The bags of all tables, one table after the other, with keys in place of ids."""
        return joined([each.flat for each in self.tables], self._keys.of_ids, self.stack.dtype)

    def get_ready(self) -> None:
        """Computes what does not need the values, while these are on their way."""
        _ = self.moved


class StackRows:
    """Rows of one stack, to be pulled.

    Args:
        number: Number of the stack.
        router: Its router.
        keys: The keys of the rows, each once, in order.
        cuts: Where in the keys each server's begin, and their number at the end.
    """

    def __init__(self, number: int, router: Router, keys: Tensor, cuts: Sequence[int]) -> None:
        self.keys = keys
        self._cuts = cuts
        self._number = number
        self._router = router

    def slices(self) -> Iterator[tuple[int, str, int, int]]:
        """Yields number and name of each server that has some, and which of the keys."""
        for k, server in enumerate(self._router.stack.servers):
            if self._cuts[k] < self._cuts[k + 1]:
                yield k, server, self._cuts[k], self._cuts[k + 1]

    def requests(self) -> Mapping[str, Message]:
        """Returns the rows to ask of each server that has some."""
        return {
            server: (self._number, self._router.rows(self.keys[begin:end], k))
            for k, server, begin, end in self.slices()
        }

    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows by key."""
        stack = self._router.stack
        parts = [answers[server] for server in stack.servers if server in answers]
        if not parts:
            return torch.empty(0, stack.dim, dtype=stack.dtype, device="cpu")
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class RowRequest(StackRequest):
    """Rows, each once; the trainer pools them."""

    def __init__(self, number: int, router: Router, tables: Sequence[TableIds], keys: Keys) -> None:
        super().__init__(number, router, tables, keys)
        self.rows = StackRows(number, router, keys.distinct, keys.cuts)

    def requests(self) -> Mapping[str, Message]:
        """Returns the rows to ask of each server that has some."""
        return self.rows.requests()

    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows by key."""
        return self.rows.gather(answers)

    def bytes_of(self, flat: Flat, rows: int) -> tuple[int, int]:
        """Returns what the pull of a table with so many rows moves, and the push."""
        return rows_bytes(self._router, rows)

    def sums(self, values: Tensor) -> Tensor:
        """Pools the rows."""
        bags = self._bags
        if self.stack.takes_max or (bags.weights is not None and bags.weights.requires_grad):
            return self._natively(values, bags)
        return pool(values, bags, self._transpose) if values.requires_grad else pooled(values, bags)

    def _natively(self, values: Tensor, bags: Bags) -> Tensor:
        if bags.offsets is None:
            return pooled(values, bags)
        if not len(bags.entries):
            # Of no ids; but all that needs a gradient gets one.
            nothing = values.sum() if bags.weights is None else values.sum() + bags.weights.sum()
            return values.new_zeros(len(bags.offsets), self.stack.dim) + nothing
        mode = "max" if self.stack.takes_max else "sum"
        return functional.embedding_bag(
            bags.entries, values, bags.offsets, mode=mode, per_sample_weights=bags.weights
        )

    def get_ready(self) -> None:
        """Computes what does not need the values, while these are on their way."""
        super().get_ready()
        _ = self._bags
        if torch.is_grad_enabled() and not self.stack.takes_max:
            _ = self._transpose

    @functools.cached_property
    def _bags(self) -> Bags:
        bags = self._joined
        offsets = None if bags.length == 1 else bags.offsets
        return Bags(self._keys.order.inverse(), offsets, bags.weights)

    @functools.cached_property
    def _transpose(self) -> Bags:
        """Which bags each row is in."""
        keys, weights = self._keys.order, self._bags.weights
        weights = None if weights is None else weights.index_select(0, keys.order)
        return Bags(self._joined.numbers(keys.order), keys.starts, weights)

    def pushes(self, gradient: Tensor) -> Mapping[str, tuple[Any, ...]]:
        """Returns rows and gradients for each server that has some."""
        kept = self._trained(self.rows.keys)
        pushes = {}
        for k, server, begin, end in self.rows.slices():
            rows, own = self._router.rows(self.rows.keys[begin:end], k), gradient[begin:end]
            if kept is not None:
                rows, own = rows[kept[begin:end]], own[kept[begin:end]]
            if len(rows):
                pushes[server] = (rows, own)
        return pushes

    def _trained(self, keys: Tensor) -> Tensor | None:
        """Returns which keys are not of padding; None for all."""
        padding = [
            self._router.keys(member, torch.tensor([member.config.padding_idx], device="cpu"))
            for _, member, _ in self.tables
            if member.config.padding_idx is not None and member.config.pooling == "none"
        ]
        return ~torch.isin(keys, torch.cat(padding).to(keys.dtype)) if padding else None


class Ages(NamedTuple):
    """The ages of rows, when a lookup pulls.

    Attributes:
        oldest: The smallest age that will do when the rows are used.
        now: The age that a row is expected to have if it is pulled now.
        counts_steps: Whether ages are steps of the trainer, rather than versions of servers.
    """

    oldest: int
    now: int
    counts_steps: bool


class CachedRequest(RowRequest):
    """Rows, each once, of which some are in a cache.

    Args:
        number: Number of the stack.
        router: Routes its ids.
        tables: The tables that are looked up.
        cache: The cache of the stack.
        ages: The ages of the rows.
        may_wait: Whether rows will do that an earlier lookup has yet to receive.
    """

    def __init__(
        self,
        number: int,
        router: Router,
        tables: Sequence[TableIds],
        cache: RowCache,
        ages: Ages,
        *,
        may_wait: bool,
    ) -> None:
        super().__init__(number, router, tables, router.route(tables))
        self._cache = cache
        self._ages = ages
        self._is_ahead = may_wait
        self._is_held = True
        keys = self.rows.keys
        self._wanted = cache.reserve(keys, ages.oldest, ages.now, may_wait=may_wait)
        self._pulled = self._wanted
        self._pulls = 0
        self._fetch(self._wanted)

    def _fetch(self, which: Tensor) -> None:
        """Sets which rows are asked for next."""
        keys = self.rows.keys[which]
        self._missing = StackRows(self.number, self._router, keys, self._router.counted(keys)[0])
        self._pulls += len(keys)

    def requests(self) -> Mapping[str, Message]:
        """Returns the rows to ask of each server, which the cache lacks."""
        return self._missing.requests()

    def arrive(self, versions: Mapping[str, int], answers: Mapping[str, Tensor], step: int) -> None:
        """Takes rows over into the cache."""
        missing = self._missing
        of_rows = torch.empty(len(missing.keys), dtype=torch.int64, device="cpu")
        for _, server, begin, end in missing.slices():
            of_rows[begin:end] = versions[server]
        born = torch.full_like(of_rows, self._ages.now) if self._ages.counts_steps else of_rows
        self._cache.arrive(missing.keys, missing.gather(answers), born, of_rows)

    def is_late(self, ages: Ages) -> bool:
        """Returns whether rows have become too old; these are asked for next."""
        is_late = self._cache.too_old(self.rows.keys, ages.oldest)
        if not bool(is_late.any()):
            return False
        self._ages, self._pulled = ages, self._wanted | is_late
        self._fetch(is_late)
        return True

    def take(self, step: int) -> dict[str, int]:
        """Takes the rows from the cache, for a step of the trainer.

        Returns:
            The oldest version of the rows from each server whose pull it lacks. A server counts the
            staleness of a pull itself, unless the pull was sent ahead.
        """
        self.values, versions = self._cache.take(self.rows.keys)
        self._cache.release(self.rows.keys)
        self._is_held = False
        self.version = int(versions.min()) if len(versions) else step
        return {
            server: int(versions[begin:end].min())
            for _, server, begin, end in self.rows.slices()
            if self._is_ahead or not bool(self._wanted[begin:end].all())
        }

    def abandon(self) -> None:
        """Gives the rows up, if they were not taken."""
        if self._is_held:
            self._is_held = False
            self._cache.abandon(self.rows.keys, self._wanted)

    @functools.cached_property
    def moved(self) -> dict[str, Traffic]:
        """What the lookup moves by table: rows are pulled that the cache lacks."""
        _, pulled = self._router.counted(self.rows.keys[self._pulled])
        again = self._pulls - int(self._pulled.sum())  # rows that were pulled twice
        size = self._router.dtype.itemsize + self._router.pulled_bytes
        found = super().moved
        for moved, (number, _, _) in zip(found.values(), self.tables, strict=True):
            moved.pulled_bytes = (pulled[number] + again) * size
            moved.hits = moved.rows - pulled[number]
            again = 0
        return found


class SumRequest(StackRequest):
    """Sums of bags; the servers pool."""

    def __init__(self, number: int, router: Router, tables: Sequence[TableIds], keys: Keys) -> None:
        super().__init__(number, router, tables, keys)
        weights = self._joined.weights
        self._weights = None if weights is None else weights.detach()
        self._length = self._joined.length if self.stack.stripes == 1 else 0
        """The length of all bags, if that is the same on each server; else 0."""
        self._bags: dict[int, range] = {}
        """Which bags each server sums; those of one server follow one another."""
        if self.stack.stripes > 1:
            self._bags = dict.fromkeys(range(self.stack.stripes), range(self._joined.bags))
            return
        end = 0
        for _, member, flat in tables:
            begin = self._bags[member.server].start if member.server in self._bags else end
            end += flat.bags
            self._bags[member.server] = range(begin, end)

    def requests(self) -> Mapping[str, Message]:
        """Returns the bags to sum for each server: rows, lengths, and weights of rows.

        Lengths are a number that all bags have, or follow the rows in their tensor.
        """
        requests = {}
        for server, ids, lengths in self._striped() if self.stack.stripes > 1 else self._whole():
            rows = self._router.rows(self._keys.of_ids[ids], server)
            weights = None if self._weights is None else self._weights[ids]
            bags, length = len(self._bags[server]), self._length
            if lengths is not None:
                rows, length = torch.cat([rows, lengths.to(rows.dtype)]), 0
            requests[self.stack.servers[server]] = (self.number, rows, bags, length, weights)
        return requests

    def _whole(self) -> Iterator[tuple[int, slice, Tensor | None]]:
        """Yields servers, which ids are theirs, and the lengths of their bags if they differ."""
        lengths = None if self._length else self._joined.lengths()
        first = 0
        for server, bags in self._bags.items():
            end = first + sum(
                each.flat.n_ids for each in self.tables if each.member.server == server
            )
            own = None if lengths is None else lengths[bags.start : bags.stop]
            yield server, slice(first, end), own
            first = end

    def _striped(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        servers = self._keys.of_ids.div(self.stack.stride, rounding_mode="floor")
        numbers = self._joined.numbers()
        for server, bags in self._bags.items():
            ids = (servers == server).nonzero().view(-1)
            yield server, ids, torch.bincount(numbers[ids], minlength=len(bags))

    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the sums of all bags."""
        parts = [answers[self.stack.servers[server]] for server in self._bags]
        if len(parts) == 1:
            return parts[0]
        if self.stack.stripes == 1:
            return torch.cat(parts)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def bytes_of(self, flat: Flat, rows: int) -> tuple[int, int]:
        """Returns what the pull of a table with so many rows moves, and the push."""
        return sums_bytes(self._router, flat, rows, has_lengths=not self._length)

    def pushes(self, gradient: Tensor) -> Mapping[str, tuple[Any, ...]]:
        """Returns for each server its rows, in which bags each is, and the gradients of bags."""
        return {
            self.stack.servers[server]: (*self._entries[server], gradient[bags.start : bags.stop])
            for server, bags in self._bags.items()
            if server in self._entries
        }

    def get_ready(self) -> None:
        """Computes what does not need the values, while these are on their way."""
        if torch.is_grad_enabled():
            _ = self._entries  # First: then rows are counted already.
        super().get_ready()

    @functools.cached_property
    def _entries(self) -> dict[int, tuple[Any, ...]]:
        """For each server that has some: its rows, and in which bags each is."""
        keys, cuts, dtype = self._keys.order, self._keys.cuts, self._router.dtype
        entries = self._joined.numbers(keys.order)
        weights = None if self._weights is None else self._weights.index_select(0, keys.order)
        found = {}
        for server, bags in self._bags.items():
            low, high = cuts[server], cuts[server + 1]
            if low == high:
                continue
            begin, end = keys.place(low), keys.place(high)
            counts = torch.diff(keys.starts[low:high], append=torch.tensor([end], device="cpu"))
            rows, own = self._router.rows(keys.unique[low:high], server), entries[begin:end]
            found[server] = (
                Entries(rows, counts, own - bags.start if bags.start else own).numbers(dtype),
                high - low,
                None if weights is None else weights[begin:end],
            )
        return found


def prepare(number: int, router: Router, tables: Sequence[TableIds]) -> list[StackRequest]:
    """Returns what to pull of one stack; of each table, that which moves fewer bytes."""
    # The bags of a server follow one another.
    tables = sorted(tables, key=lambda each: each.member.server)
    keys = router.route(tables)
    sums = _pooled_there(router, tables, keys)
    if not sums:
        return [RowRequest(number, router, tables, keys)]
    if len(sums) == len(tables):
        return [SumRequest(number, router, tables, keys)]
    there = [each for each in tables if each.number in sums]
    rest = [each for each in tables if each.number not in sums]
    kinds: tuple[tuple[type[StackRequest], list[TableIds]], ...] = (
        (SumRequest, there),
        (RowRequest, rest),
    )
    return [kind(number, router, own, router.route(own)) for kind, own in kinds]


def _pooled_there(router: Router, tables: Sequence[TableIds], keys: Keys) -> set[int]:
    """Returns the tables that the servers pool, since sums move fewer bytes than rows."""
    if router.stack.takes_max or router.is_dynamic:
        return set()
    limits = {}
    for number, _, flat in tables:
        if flat.offsets is None or flat.length == 1:
            continue  # There are no fewer bags than rows.
        if flat.weights is not None and flat.weights.requires_grad:
            continue
        # Both are linear in the number of rows, and sums have less for each.
        fixed = sum(sums_bytes(router, flat, 0))
        each = sum(rows_bytes(router, 1)) - (sum(sums_bytes(router, flat, 1)) - fixed)
        limits[number] = fixed // each
    return keys.beyond(limits) if limits else set()


def rows_bytes(router: Router, rows: int) -> tuple[int, int]:
    """Returns what a pull of rows moves, and a push of their gradients."""
    number = router.dtype.itemsize
    return rows * (number + router.pulled_bytes), rows * (number + router.pushed_bytes)


def sums_bytes(
    router: Router, flat: Flat, rows: int, *, has_lengths: bool | None = None
) -> tuple[int, int]:
    """Returns what a pull of sums moves, and a push of their gradients.

    Args:
        router: The router of the stack.
        flat: The ids of the table.
        rows: The number of their rows.
        has_lengths: Whether the lengths of bags are sent; by default, if the form of these ids
            does not tell them.
    """
    stack, number = router.stack, router.dtype.itemsize
    if has_lengths is None:
        has_lengths = stack.stripes > 1 or not flat.length
    entries = flat.n_ids * (number + (0 if flat.weights is None else stack.dtype.itemsize))
    bags = stack.stripes * flat.bags
    pulled = entries + bags * ((number if has_lengths else 0) + router.pulled_bytes)
    return pulled, entries + 2 * number * rows + bags * router.pushed_bytes


def joined(flats: Sequence[Flat], keys: Tensor, dtype: torch.dtype) -> Flat:
    """Returns the bags of several tables, one table after the other.

    Args:
        flats: The bags of each table.
        keys: The keys of their ids, which take the place of these.
        dtype: The type of weights: ones in a table without any, if another one has some.
    """
    length = flats[0].length if len({flat.length for flat in flats}) == 1 else 0
    weights, offsets = None, torch.arange(0, len(keys), length or 1, device="cpu")
    if not length:
        begin, parts = 0, []
        for flat in flats:
            own = torch.arange(flat.n_ids, device="cpu") if flat.offsets is None else flat.offsets
            parts.append(own + begin)
            begin += flat.n_ids
        offsets = torch.cat(parts)
    if any(flat.weights is not None for flat in flats):
        ones = [torch.ones(flat.n_ids, dtype=dtype, device="cpu") for flat in flats]
        given = [flat.weights for flat in flats]
        weights = torch.cat(
            [one if own is None else own for one, own in zip(ones, given, strict=True)]
        )
    return Flat(keys, offsets, (), weights, keys.device, length)


def averaged(tables: TableIds, sums: Tensor) -> Tensor:
    """Returns the sums of a table's bags, or their means if it pools so."""
    if tables.member.config.pooling != "mean":
        return sums
    lengths = tables.flat.lengths().clamp_(min=1).unsqueeze(1)
    return sums / lengths.to(sums.dtype)
