"""What one lookup pulls of one stack: the interface of rows and of sums, and the form of bags.

The values are a leaf of the trainer's graph. The gradient of the leaf, in slices, is the push.
"""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.embedding.inputs import Flat
from torchweft.embedding.plan import Member, Stack
from torchweft.embedding.routing import Router

Request = tuple[Any, ...]
Outputs = list[tuple[Member, Tensor]]


class Looked(NamedTuple):
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


class Moved(NamedTuple):
    """What one lookup of a table moves; the fields are those of ``Traffic``."""

    table: str
    ids: int
    rows: int
    pulled_bytes: int
    pushed_bytes: int
    hits: int = 0


class Pulled(abc.ABC):
    """What one lookup pulls of one stack.

    Args:
        number: Number of the stack.
        router: Routes its ids.
        looked: The tables that are looked up.
    """

    def __init__(self, number: int, router: Router, looked: Sequence[Looked]) -> None:
        self.number = number
        self.looked = looked
        self.version = 0
        """The oldest version that a server's values are of."""
        self.versions: Mapping[str, int] = {}
        """The version of each server's values; none where a cache had some."""
        self.place = 0
        """Its position among all lookups of the collection."""
        self.is_noted = False
        self._router = router
        self._leaf: Callable[[], Tensor | None] = lambda: None

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self._router.stack

    @property
    def used(self) -> int:
        """Bit i tells that member i is looked up."""
        return sum(1 << each.number for each in self.looked)

    def leaf(self) -> Tensor | None:
        """Returns the leaf while it is alive; this object does not keep it."""
        return self._leaf()

    def make_leaf(self, values: Tensor, when_touched: Callable[[Pulled], None]) -> Tensor:
        """Makes pulled values a leaf.

        Args:
            values: The values.
            when_touched: Called once there is a first gradient of them.
        """
        values.requires_grad_()
        values.weft_pulled = self  # type: ignore[attr-defined]  # found by the optimizer
        self._leaf = weakref.ref(values)
        values.register_hook(lambda _: when_touched(self))  # type: ignore[no-untyped-call]
        return values

    @abc.abstractmethod
    def requests(self) -> Mapping[str, Request]:
        """Returns what to ask of each server."""

    @abc.abstractmethod
    def gather(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Returns the values, from the servers' answers."""

    @abc.abstractmethod
    def outputs(self, values: Tensor) -> Outputs:
        """Returns the output of each table, ``(bags, dim)``."""

    @abc.abstractmethod
    def pushes(self, gradient: Tensor) -> Mapping[str, tuple[Any, ...]]:
        """Returns what to push to each server: rows and gradients, or those of bags."""

    @functools.cached_property
    def moved(self) -> list[Moved]:
        """What the lookup of each table moves, if its gradient is pushed."""
        return self._moved()

    @abc.abstractmethod
    def _moved(self) -> list[Moved]: ...

    def get_ready(self) -> None:
        """Computes what does not need the values, while these are on their way."""
        _ = self.moved


def fixed_length(flats: Sequence[Flat]) -> int:
    """Returns the length of all bags if it is the same by form, else 0."""
    length = flats[0].length
    return length if all(flat.length == length for flat in flats) else 0


def offsets_of(flats: Sequence[Flat]) -> Tensor | None:
    """Returns where the bags of several tables begin in their ids, one table after the other.

    None if each id is a bag of its own.
    """
    length = fixed_length(flats)
    if length == 1:
        return None
    if length:
        return torch.arange(0, sum(flat.n_ids for flat in flats), length, device="cpu")
    offsets, begin = [], 0
    for flat in flats:
        own = torch.arange(flat.n_ids, device="cpu") if flat.offsets is None else flat.offsets
        offsets.append(own + begin)
        begin += flat.n_ids
    return torch.cat(offsets)


def lengths_of(flats: Sequence[Flat]) -> Tensor:
    """Returns the lengths of the bags of several tables, one table after the other."""
    length = fixed_length(flats)
    if length:
        return torch.full((sum(flat.bags for flat in flats),), length, device="cpu")
    return torch.cat([flat.lengths() for flat in flats])


def numbers_of(flats: Sequence[Flat], order: Tensor | None = None) -> Tensor:
    """Returns the numbers of the bags of ids, the ids in some order."""
    length = fixed_length(flats)
    if length:
        ids = (
            torch.arange(sum(flat.n_ids for flat in flats), device="cpu")
            if order is None
            else order
        )
        return ids if length == 1 else ids.div(length, rounding_mode="floor")
    numbers, begin = [], 0
    for flat in flats:
        numbers.append(flat.numbers() + begin)
        begin += flat.bags
    joined = torch.cat(numbers)
    return joined if order is None else joined.index_select(0, order)


def weights_of(flat: Flat, dtype: torch.dtype) -> Tensor:
    """Returns the weights of ids, ones where there are none."""
    return (
        torch.ones(flat.n_ids, dtype=dtype, device="cpu") if flat.weights is None else flat.weights
    )


def averaged(looked: Looked, sums: Tensor) -> Tensor:
    """Returns the sums of a table's bags, or their means if it pools so."""
    if looked.member.config.pooling != "mean":
        return sums
    lengths = looked.flat.lengths().clamp_(min=1).unsqueeze(1)
    return sums / lengths.to(sums.dtype)
