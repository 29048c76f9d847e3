"""Sums of rows by number, and pooling as a linear map that knows its transpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class Sorted(NamedTuple):
    """Numbers in order.

    Attributes:
        unique: Each number once, rising. order: Positions of the numbers, so that equal ones are
        neighbours; those of equal ones rise. starts: Where in ``order`` each unique number begins.
    """

    unique: Tensor
    order: Tensor
    starts: Tensor

    def place(self, number: int) -> int:
        """Returns where in ``order`` a unique number begins, or the end of ``order``."""
        return int(self.starts[number]) if number < len(self.starts) else len(self.order)

    def inverse(self) -> Tensor:
        """Returns the position in ``unique`` of each of the numbers."""
        count = self.order.shape[0]
        lengths = torch.diff(self.starts, append=self.starts.new_tensor([count]))
        ranks = torch.arange(self.unique.shape[0], device="cpu").repeat_interleave(
            lengths, output_size=count
        )
        return torch.empty_like(ranks).scatter_(0, self.order, ranks)


_RADIX_FROM: Final = 1 << 15
"""From so many int32 numbers on, torch sorts by radix, in about a third of the time."""
_WORTH_PADDING: Final = 1 << 13
"""From so many on, a radix sort of the numbers with padding is the faster one."""


def sort(numbers: Tensor) -> Sorted:
    """Sorts numbers ``(n,)``; the order of equal ones is kept."""
    count = numbers.shape[0]
    if numbers.dtype == torch.int32 and _WORTH_PADDING <= count < _RADIX_FROM:
        # The padding has the largest value and the last positions, so it is sorted to the end.
        padding = (0, _RADIX_FROM - count)
        numbers = functional.pad(numbers, padding, value=torch.iinfo(torch.int32).max)
    ordered, order = (each[:count] for each in torch.sort(numbers, stable=True))
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    return Sorted(unique, order, counts.cumsum(0).sub_(counts))


def take(source: Tensor, rows: Tensor, into: Tensor | None = None) -> Tensor:
    """Returns copies of rows of a contiguous tensor on the CPU; they are in range.

    ``into``, at least as long, is overwritten by them and returned as far as it is.
    """
    # "clip" omits another check, and copies rows as a whole: faster than index_select.
    if into is None:
        return torch.from_numpy(source.numpy().take(rows.numpy(), axis=0, mode="clip"))
    into = into[: rows.shape[0]]
    source.numpy().take(rows.numpy(), axis=0, mode="clip", out=into.numpy())
    return into


def put(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """Sets rows of a contiguous tensor on the CPU; each row occurs once."""
    # A row as one element: a third of the time of index_copy_, a fifth of index_add_.
    row = np.dtype((np.void, target.shape[1] * target.itemsize))
    # "clip" omits another check: two thirds of the time of an assignment.
    np.put(target.numpy().view(row), rows.numpy(), values.numpy().view(row), mode="clip")


class Bags(NamedTuple):
    """Which rows are summed in each bag: a sparse matrix.

    Attributes:
        entries: Rows, of one bag after the other.
        offsets: Where each bag begins; None if each entry is a bag of its own.
        weights: A factor for each entry.
    """

    entries: Tensor
    offsets: Tensor | None
    weights: Tensor | None = None


def pooled(rows: Tensor, bags: Bags) -> Tensor:
    """Returns the sum of the rows of each bag, ``(bags, dim)``."""
    if bags.offsets is None:
        found = rows.index_select(0, bags.entries)
        return found if bags.weights is None else found * bags.weights.unsqueeze(1)
    if not bags.entries.shape[0]:
        return rows.new_zeros(bags.offsets.shape[0], rows.shape[1])
    return functional.embedding_bag(
        bags.entries, rows, bags.offsets, mode="sum", per_sample_weights=bags.weights
    )


Part = tuple[Any, ...]
"""Gradients of rows, of one of two kinds.

Values: rows ``(n,)``, each once, and their gradients ``(n, dim)``. Entries: rows ``(n,)``, each
once; how many entries each has ``(n,)``; the entries of one row after the other, which are
positions of values; their factors, or None; and the values ``(m, dim)``.
"""


def summed(parts: Sequence[Part], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields sums of gradients by row, in the order of the parts.

    Args:
        parts: Gradients.
        size: Number of rows that are yielded at a time.

    Yields:
        Rows and the sums of their gradients; each row once in all.
    """
    if len(parts) == 1 and len(parts[0]) == 2:
        rows, gradients = parts[0]
        yield from zip(torch.split(rows, size), torch.split(gradients, size), strict=True)
    elif len(parts) == 1:
        rows, counts, entries, weights, values = parts[0]
        starts = counts.cumsum(0, dtype=counts.dtype).sub_(counts)
        yield from _sums(rows, Bags(entries, starts, weights), values.contiguous(), size)
    elif parts:
        yield from _sums(*_joined(parts), size)


def sum_rows(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Returns rows, each once, and the sums of their gradients, in the order of the parts."""
    found = [*summed(parts, max(1, sum(len(part[0]) for part in parts)))]
    return found[0] if found else (parts[0][0][:0], parts[0][-1][:0])


def _sums(rows: Tensor, bags: Bags, values: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows and the sums of their values; ``bags`` has the values of each row."""
    assert bags.offsets is not None
    if not len(rows):
        return
    ends = [*bags.offsets[::size].tolist(), len(bags.entries)]
    chunks = zip(torch.split(rows, size), torch.split(bags.offsets, size), strict=True)
    for place, (chunk, offsets) in enumerate(chunks):
        begin, end = ends[place : place + 2]
        weights = None if bags.weights is None else bags.weights[begin:end]
        yield chunk, pooled(values, Bags(bags.entries[begin:end], offsets - begin, weights))


def _joined(parts: Sequence[Part]) -> tuple[Tensor, Bags, Tensor]:
    """Returns the rows of several parts, each once; the values of each; and all values."""
    rows, entries, weights, begin = [], [], [], 0
    has_weights = any(len(part) > 2 and part[3] is not None for part in parts)
    for part in parts:
        own, number, factors = part[0], torch.arange(len(part[0]), device="cpu"), None
        if len(part) > 2:
            _, counts, number, factors, _ = part
            own = own.repeat_interleave(counts, output_size=len(number))
        rows.append(own)
        entries.append(number.long() + begin)
        begin += len(part[-1])
        if has_weights:
            weights.append(part[-1].new_ones(len(own)) if factors is None else factors)
    ordered = sort(torch.cat(rows))
    bags = Bags(
        torch.cat(entries).index_select(0, ordered.order),
        ordered.starts,
        torch.cat(weights).index_select(0, ordered.order) if has_weights else None,
    )
    return ordered.unique, bags, torch.cat([part[-1] for part in parts])


class _Pool(torch.autograd.Function):
    """Pooling; its gradient is pooling by the transpose, whose gradient is pooling, and so on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: Bags, transpose: Bags) -> Tensor:
        """Pools."""
        ctx.maps = (bags, transpose)
        return pooled(rows.contiguous(), bags)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Pools by the transpose."""
        bags, transpose = ctx.maps
        return pool(gradient, transpose, bags), None, None


def pool(rows: Tensor, bags: Bags, transpose: Bags) -> Tensor:
    """Returns the sum of the rows of each bag; can be differentiated any number of times."""
    apply: Any = _Pool.apply  # It has a type in some versions of torch, and none in others.
    found: Tensor = apply(rows, bags, transpose)
    return found
