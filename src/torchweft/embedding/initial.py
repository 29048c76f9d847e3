"""Initial values of tables: a function of seed, table, row and column alone.

Any server computes those of its own rows and columns, in whatever way a table is cut. A generator
of random numbers would have to make all values before. So each value is a hash of its place:
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of
a counter; normal values by Box and Muller.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from torchweft.embedding.configs import Constant, Normal, TableConfig

_BLOCK: Final = 1 << 18
"""Values that are computed at a time: they stay in the cache."""

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_TWO_PER_VALUE: Final = 2
_MANTISSA_BITS: Final = 53


def fill(target: Tensor, config: TableConfig, rows: range, columns: range, seed: int) -> None:
    """Sets a tensor to the initial values of some rows and columns of a table.

    Args:
        target: A tensor ``(len(rows), len(columns))``.
        config: The table.
        rows: The rows, in any steps.
        columns: The columns.
        seed: The seed of the collection.
    """
    if isinstance(config.initial, Constant):
        target.fill_(config.initial.value)
    else:
        size = max(1, _BLOCK // len(columns))
        for begin in range(0, len(rows), size):
            part = rows[begin : begin + size]
            numbers = torch.arange(part.start, part.stop, part.step, device="cpu")
            target[begin : begin + size] = values(config, numbers, columns, seed)
    if config.padding_idx is not None and config.padding_idx in rows:
        target[rows.index(config.padding_idx)] = 0


def values(config: TableConfig, rows: Tensor, columns: range, seed: int) -> Tensor:
    """Returns the initial values of rows, without regard to padding.

    Args:
        config: The table.
        rows: Numbers of rows, any integers, int64.
        columns: The columns.
        seed: The seed of the collection.
    """
    initial = config.initial
    if isinstance(initial, Constant):
        return torch.full(
            (len(rows), len(columns)), initial.value, dtype=config.dtype, device="cpu"
        )
    places = rows[:, None] * config.dim + torch.arange(columns.start, columns.stop, device="cpu")
    counters = places * _TWO_PER_VALUE
    start = _mixed(seed * _GOLDEN + config.number)
    first = _uniform(counters, start)
    if isinstance(initial, Normal):
        second = _uniform(counters + 1, start)
        radius = (-2 * torch.log1p(-first)).sqrt_()
        found = radius * torch.cos(2 * math.pi * second) * initial.std + initial.mean
    else:
        found = first * (initial.high - initial.low) + initial.low
    return found.to(config.dtype)


def values_of_ids(config: TableConfig, ids: Tensor, columns: range, seed: int) -> Tensor:
    """Returns the initial values of ids of a dynamic table.

    Args:
        config: The table.
        ids: Any ids, int64.
        columns: The columns.
        seed: The seed of the collection.
    """
    # Mixed, as the counters of values lose the high bits of a row's number.
    parts = torch.split(mixed(ids), max(1, _BLOCK // len(columns)))
    found = torch.cat([values(config, part, columns, seed) for part in parts])
    if config.padding_idx is not None:
        found[ids == config.padding_idx] = 0
    return found


def mixed(numbers: Tensor) -> Tensor:
    """Returns a hash of int64 numbers, different for different ones: SplitMix64's finalizer."""
    state = (numbers ^ shifted(numbers, 30)) * _signed(_FIRST)
    state = (state ^ shifted(state, 27)) * _signed(_SECOND)
    return state ^ shifted(state, 31)


def _uniform(counters: Tensor, start: int) -> Tensor:
    """Returns a float64 number in [0, 1) for each counter."""
    state = mixed(counters * _signed(_GOLDEN) + _signed(start))
    return shifted(state, 64 - _MANTISSA_BITS).double() * 2.0**-_MANTISSA_BITS


def shifted(state: Tensor, bits: int) -> Tensor:
    """Shifts to the right without a sign; torch has only the arithmetic shift of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(number: int) -> int:
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number
