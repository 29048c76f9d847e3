"""Rows: sums by number, pooling as a linear map, and the form of values in messages.

All forms in messages round to the nearest value, ties to even; nothing is random. ``int8`` has one
scale for each row: the largest magnitude of the row, divided by 127.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchweft.embedding.errors import InputError
from torchweft.errors import ConfigurationError
from torchweft.extending import rebuilds_plain


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


_POSITION_BITS: Final = 32


def distinct(numbers: Tensor) -> Tensor:
    """Returns numbers ``(n,)`` on the CPU, int32 or int64, each once, rising."""
    ordered = np.sort(numbers.numpy())
    return torch.from_numpy(ordered[_begins(ordered)])


def _begins(ordered: Any) -> Any:
    """Returns which of some sorted numbers differ from those before them."""
    begins = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    return begins


def sort(numbers: Tensor) -> Sorted:
    """Sorts numbers ``(n,)`` on the CPU, int32 or int64; the order of equal ones is kept."""
    if numbers.dtype != torch.int32:
        ordered, order = torch.sort(numbers, stable=True)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        return Sorted(unique, order, counts.cumsum(0).sub_(counts))
    # Number and position in one, as the vector sort returns no positions.
    pairs = numbers.numpy().astype(np.int64)
    pairs <<= _POSITION_BITS
    pairs |= np.arange(len(pairs))
    pairs.sort()
    values = (pairs >> _POSITION_BITS).astype(np.int32)
    starts = np.flatnonzero(_begins(values))
    pairs &= (1 << _POSITION_BITS) - 1
    found = (values[starts], pairs, starts)
    return Sorted(*(torch.from_numpy(each) for each in found))


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
        # Memory that is new for each lookup: numpy takes large pages for it, where it can.
        alone = not rows.requires_grad and rows.is_contiguous()
        found = take(rows, bags.entries) if alone else rows.index_select(0, bags.entries)
        return found if bags.weights is None else found * bags.weights.unsqueeze(1)
    if not bags.entries.shape[0]:
        return rows.new_zeros(bags.offsets.shape[0], rows.shape[1])
    return functional.embedding_bag(
        bags.entries, rows, bags.offsets, mode="sum", per_sample_weights=bags.weights
    )


Part = tuple[Any, ...]
"""Gradients of rows, of one of two kinds.

Values: rows ``(n,)``, each once, and their gradients ``(n, dim)``. Entries: the result of
``Entries.numbers``, the number of rows, factors of the entries or None, and values ``(m, dim)``.
"""


class Entries(NamedTuple):
    """Rows, and which values are summed for each.

    Attributes:
        rows: The rows ``(n,)``, each once.
        counts: How many entries each has ``(n,)``.
        entries: The entries of one row after the other, which are positions of values.
    """

    rows: Tensor
    counts: Tensor
    entries: Tensor

    @classmethod
    def of(cls, part: Part) -> Entries:
        """Returns those of gradients of the second kind."""
        numbers, count = part[0], part[1]
        return cls(numbers[:count], numbers[count : 2 * count], numbers[2 * count :])

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Returns all of them in one tensor: each tensor of a message takes time of its own."""
        count = len(self.rows)
        found = torch.empty(2 * count + len(self.entries), dtype=dtype, device="cpu")
        for place, part in zip(Entries.of((found, count)), self, strict=True):
            place.copy_(part)
        return found


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
        (rows, counts, entries), (weights, values) = Entries.of(parts[0]), parts[0][2:]
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
    has_weights = any(len(part) > 2 and part[2] is not None for part in parts)
    for part in parts:
        if len(part) > 2:
            (own, counts, number), factors = Entries.of(part), part[2]
            own = own.repeat_interleave(counts, output_size=len(number))
        else:
            own, factors = part[0], None
            number = torch.arange(len(own), device="cpu")
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
        return pooled(rows.detach().contiguous(), bags)

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


Form = Literal["fp16", "bf16", "int8"]
FLOATS: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_FORMS: Final = (None, *FLOATS, "int8")
_LARGEST: Final = 127
_SCALE: Final = torch.float32


@rebuilds_plain
@dataclass(frozen=True)
class Wire:
    """How rows and gradients travel; see ``Tables``.

    Args:
        pulled: The form of rows, and of sums of bags, that a trainer pulls: ``"fp16"``, ``"bf16"``
            or ``"int8"``; None for the type of the table.
        pushed: The same for gradients that a trainer pushes.

    Raises:
        ConfigurationError: There is no such form.
    """

    pulled: Form | None = None
    pushed: Form | None = None

    def __post_init__(self) -> None:
        for name in ("pulled", "pushed"):
            form = getattr(self, name)
            if form not in _FORMS:
                raise ConfigurationError(
                    f"{name}={form!r} is no form of values in messages; use one of "
                    f"{', '.join(map(repr, _FORMS))}"
                )


def row_bytes(form: Form | None, dim: int, dtype: torch.dtype) -> int:
    """Returns the size of a row of some columns in a message."""
    if form is None:
        return dim * dtype.itemsize
    return dim + _SCALE.itemsize if form == "int8" else dim * FLOATS[form].itemsize


def encode(values: Tensor, form: Form | None) -> Any:
    """Returns rows ``(n, dim)`` in the form of a message."""
    if form is None:
        return values
    if form == "int8":
        scales = (values.abs().amax(1, keepdim=True) / _LARGEST).to(_SCALE)
        # A row of zeros, or of values so small that their scale is zero, becomes zeros.
        divisors = torch.where(scales == 0, 1.0, scales).to(values.dtype)
        codes = (values / divisors).round_().clamp_(-_LARGEST, _LARGEST)
        return codes.nan_to_num_(0.0).to(torch.int8), scales
    dtype = FLOATS[form]
    bounds = torch.finfo(dtype)
    return torch.where(values.isfinite(), values.clamp(bounds.min, bounds.max), values).to(dtype)


def decode(
    payload: Any, form: Form | None, dtype: torch.dtype, server: str = "", table: str = ""
) -> Tensor:
    """Returns the rows of a message.

    Args:
        payload: The content of the message.
        form: Its form.
        dtype: The type of the table.
        server: The server that receives it, for messages.
        table: The tables that it is for.

    Raises:
        InputError: The payload has another form.
    """
    if form is None:
        found: Tensor = payload
        return found
    if form == "int8":
        if _is_int8(payload):
            codes, scales = payload
            rows: Tensor = codes.to(dtype) * scales.to(dtype)
            return rows
    elif isinstance(payload, Tensor) and payload.dtype == FLOATS[form] and payload.dim() == 2:
        return payload.to(dtype)
    described = payload.dtype if isinstance(payload, Tensor) else type(payload).__name__
    raise InputError(
        f"server {server!r} was sent values of {described} for {table}; its tables take "
        f"{form!r} in messages",
        server=server,
        table=table,
    )


def _is_int8(payload: Any) -> bool:
    if not isinstance(payload, (tuple, list)) or len(payload) != 2:
        return False
    codes, scales = payload
    return (
        all(isinstance(each, Tensor) for each in payload)
        and (codes.dtype, codes.dim()) == (torch.int8, 2)
        and (scales.dtype, tuple(scales.shape)) == (_SCALE, (codes.shape[0], 1))
    )
