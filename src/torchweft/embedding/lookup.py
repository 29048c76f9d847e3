"""Pulls the rows of a batch, or has its bags summed on the servers, whichever moves fewer bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.embedding.inputs import Flat
from torchweft.embedding.plan import Stack
from torchweft.embedding.pulled import (
    Looked,
    Moved,
    Outputs,
    Pulled,
    Request,
    averaged,
    fixed_length,
    lengths_of,
    numbers_of,
    offsets_of,
    weights_of,
)
from torchweft.embedding.routing import Routed, Router
from torchweft.embedding.rows import Bags, Entries, pool, pooled


class Fetch:
    """Rows of one stack, to be pulled.

    Args:
        number: Number of the stack.
        router: Its router.
        keys: The keys of the rows, each once, rising.
        cuts: Where in the keys each server's begin, and their number at the end.
    """

    def __init__(self, number: int, router: Router, keys: Tensor, cuts: Sequence[int]) -> None:
        self.keys = keys
        self.cuts = cuts
        self._number = number
        self._router = router

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self._router.stack

    def requests(self) -> Mapping[str, Request]:
        """Returns the rows to ask of each server that has some."""
        return {
            server: (self._number, self._router.rows(self.keys[begin:end], k))
            for k, server, begin, end in self.slices()
        }

    def slices(self) -> Iterator[tuple[int, str, int, int]]:
        """Yields number and name of each server that has some, and which of the keys."""
        for k, server in enumerate(self.stack.servers):
            if self.cuts[k] < self.cuts[k + 1]:
                yield k, server, self.cuts[k], self.cuts[k + 1]

    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows by key."""
        parts = [answers[server] for server in self.stack.servers if server in answers]
        if not parts:
            return torch.empty(0, self.stack.dim, dtype=self.stack.dtype, device="cpu")
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PulledRows(Pulled):
    """Rows, each once; the trainer pools them."""

    def __init__(
        self, number: int, router: Router, looked: Sequence[Looked], routed: Routed
    ) -> None:
        super().__init__(number, router, looked)
        self._routed = routed
        self.rows = Fetch(number, router, routed.distinct.keys, routed.distinct.cuts)

    def requests(self) -> Mapping[str, Request]:
        """Returns the rows to ask of each server that has some."""
        return self.rows.requests()

    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows by key."""
        return self.rows.gather(answers)

    def outputs(self, values: Tensor) -> Outputs:
        """Pools the rows."""
        bags = self._bags
        if self.stack.takes_max or (bags.weights is not None and bags.weights.requires_grad):
            found = self._natively(values, bags)
        elif values.requires_grad:
            found = pool(values, bags, self._transpose)
        else:
            found = pooled(values, bags)
        parts = torch.split(found, [each.flat.bags for each in self.looked])
        return [
            (each.member, averaged(each, part))
            for each, part in zip(self.looked, parts, strict=True)
        ]

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
        flats = [each.flat for each in self.looked]
        weights = None
        if any(flat.weights is not None for flat in flats):
            weights = torch.cat([weights_of(flat, self.stack.dtype) for flat in flats])
        return Bags(self._routed.ordered.keys.inverse(), offsets_of(flats), weights)

    @functools.cached_property
    def _transpose(self) -> Bags:
        """Which bags each row is in."""
        keys, weights = self._routed.ordered.keys, self._bags.weights
        numbers = numbers_of([each.flat for each in self.looked], keys.order)
        weights = None if weights is None else weights.index_select(0, keys.order)
        return Bags(numbers, keys.starts, weights)

    def pushes(self, gradient: Tensor) -> Mapping[str, tuple[Any, ...]]:
        """Returns rows and gradients for each server that has some."""
        keys, cuts = self.rows.keys, self.rows.cuts
        kept = self._trained(keys)
        pushes = {}
        for k, server in enumerate(self.stack.servers):
            rows = self._router.rows(keys[cuts[k] : cuts[k + 1]], k)
            own = gradient[cuts[k] : cuts[k + 1]]
            if kept is not None:
                chosen = kept[cuts[k] : cuts[k + 1]]
                rows, own = rows[chosen], own[chosen]
            if len(rows):
                pushes[server] = (rows, own)
        return pushes

    def _trained(self, keys: Tensor) -> Tensor | None:
        """Returns which keys are not of padding; None for all."""
        padding = [
            self._router.keys(member, torch.tensor([member.config.padding_idx], device="cpu"))
            for _, member, _ in self.looked
            if member.config.padding_idx is not None and member.config.pooling == "none"
        ]
        return ~torch.isin(keys, torch.cat(padding).to(keys.dtype)) if padding else None

    def _moved(self) -> list[Moved]:
        found = []
        for number, member, flat in self.looked:
            rows = self._routed.counts[number]
            sizes = rows_bytes(self._router, rows)
            found.append(Moved(member.config.name, flat.n_ids, rows, *sizes))
        return found


class PulledSums(Pulled):
    """Sums of bags; the servers pool."""

    def __init__(
        self, number: int, router: Router, looked: Sequence[Looked], routed: Routed
    ) -> None:
        super().__init__(number, router, looked)
        self._routed = routed
        self._flats = [each.flat for each in looked]
        self._weights = None
        if any(flat.weights is not None for flat in self._flats):
            weights = [weights_of(flat, self.stack.dtype).detach() for flat in self._flats]
            self._weights = torch.cat(weights)
        self._bags = self._bags_by_server()

    def _bags_by_server(self) -> dict[int, range]:
        """Returns which bags each server sums; those of one server follow one another."""
        if self.stack.stripes > 1:
            bags = range(sum(flat.bags for flat in self._flats))
            return dict.fromkeys(range(self.stack.stripes), bags)
        found: dict[int, range] = {}
        end = 0
        for _, member, flat in self.looked:
            begin = found[member.server].start if member.server in found else end
            end += flat.bags
            found[member.server] = range(begin, end)
        return found

    def requests(self) -> Mapping[str, Request]:
        """Returns the bags to sum for each server: rows, lengths, and weights of rows.

        Lengths are a number that all bags have, or follow the rows in their tensor.
        """
        requests = {}
        for server, ids, lengths in self._striped() if self.stack.stripes > 1 else self._whole():
            rows = self._router.rows(self._routed.found[ids], server)
            weights = None if self._weights is None else self._weights[ids]
            bags, length = len(self._bags[server]), self._length
            if lengths is not None:
                rows, length = torch.cat([rows, lengths.to(rows.dtype)]), 0
            requests[self.stack.servers[server]] = (self.number, rows, bags, length, weights)
        return requests

    @functools.cached_property
    def _length(self) -> int:
        """The length of all bags, if that is the same on each server; else 0."""
        return fixed_length(self._flats) if self.stack.stripes == 1 else 0

    def _whole(self) -> Iterator[tuple[int, slice, Tensor | None]]:
        """Yields servers, which ids are theirs, and the lengths of their bags if they differ."""
        lengths, first = None if self._length else lengths_of(self._flats), 0
        ids = dict.fromkeys(self._bags, 0)
        for each in self.looked:
            ids[each.member.server] += each.flat.n_ids
        for server, bags in self._bags.items():
            own = None if lengths is None else lengths[bags.start : bags.stop]
            yield server, slice(first, first + ids[server]), own
            first += ids[server]

    def _striped(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        servers = self._routed.found.div(self.stack.stride, rounding_mode="floor")
        numbers = numbers_of(self._flats)
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

    def outputs(self, values: Tensor) -> Outputs:
        """Returns the sums or means by table."""
        parts = torch.split(values, [each.flat.bags for each in self.looked])
        return [
            (each.member, averaged(each, part))
            for each, part in zip(self.looked, parts, strict=True)
        ]

    def pushes(self, gradient: Tensor) -> Mapping[str, tuple[Any, ...]]:
        """Returns for each server its rows, in which bags each is, and the gradients of bags."""
        return {
            self.stack.servers[server]: (*entries, gradient[bags.start : bags.stop])
            for server, bags in self._bags.items()
            if (entries := self._entries.get(server)) is not None
        }

    def get_ready(self) -> None:
        """Computes what does not need the values, while these are on their way."""
        if torch.is_grad_enabled():
            _ = self._entries  # First: then rows are counted already.
        super().get_ready()

    @functools.cached_property
    def _entries(self) -> dict[int, tuple[Any, ...]]:
        """For each server that has some: its rows, and in which bags each is."""
        (keys, cuts, _), dtype = self._routed.ordered, self._router.dtype
        entries = numbers_of(self._flats, keys.order)
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

    def _moved(self) -> list[Moved]:
        found = []
        for number, member, flat in self.looked:
            rows = self._routed.counts[number]
            sizes = sums_bytes(self._router, flat, rows, has_lengths=not self._length)
            found.append(Moved(member.config.name, flat.n_ids, rows, *sizes))
        return found


def routed_of(router: Router, looked: Sequence[Looked]) -> Routed:
    """Returns the rows that tables of one stack need."""
    return router.route(looked)


def prepare(number: int, router: Router, looked: Sequence[Looked]) -> list[Pulled]:
    """Returns what to pull of one stack; of each table, that which moves fewer bytes."""
    # The bags of a server follow one another.
    looked = sorted(looked, key=lambda each: each.member.server)
    routed = routed_of(router, looked)
    sums = _pooled_there(router, looked, routed)
    if not sums:
        return [PulledRows(number, router, looked, routed)]
    if len(sums) == len(looked):
        return [PulledSums(number, router, looked, routed)]
    there = [each for each in looked if each.number in sums]
    rest = [each for each in looked if each.number not in sums]
    kinds = ((PulledSums, there), (PulledRows, rest))
    return [kind(number, router, own, routed_of(router, own)) for kind, own in kinds]


def _pooled_there(router: Router, looked: Sequence[Looked], routed: Routed) -> set[int]:
    """Returns the tables that the servers pool, since sums move fewer bytes than rows."""
    stack = router.stack
    if stack.takes_max or stack.is_dynamic:
        return set()
    limits = {}
    for number, _, flat in looked:
        if flat.offsets is None or flat.length == 1:
            continue  # There are no fewer bags than rows.
        if flat.weights is not None and flat.weights.requires_grad:
            continue
        # Both are linear in the number of rows, and sums have less for each.
        fixed = sum(sums_bytes(router, flat, 0))
        each = sum(rows_bytes(router, 1)) - (sum(sums_bytes(router, flat, 1)) - fixed)
        limits[number] = fixed // each
    return routed.beyond(limits) if limits else set()


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
