"""What a batched function has done so far."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from torchweft.errors import ConfigurationError
from torchweft.serialize.registry import rebuilds_plain


@rebuilds_plain
@dataclass(frozen=True)
class BatchStatistics:
    """What a batched function, or one object's batched method, has done so far.

    Attributes:
        batches: How many batches were closed.
        sizes: How many of them had each size.
        wait_s: Seconds that calls waited for their batch to be closed, all together.
        longest_wait_s: The longest of these times.
        waits: How many calls waited, by the time: by upper bounds in seconds, which exceed a call's
            time by less than a quarter.
        run_s: Seconds that the batches ran, all together.
        waiting: How many calls wait now.
        failed: Calls that ended with an error.
        refused: Calls that were refused because too many waited.
        left: Calls that left the queue because their callers no longer waited.
    """

    batches: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    waits: dict[float, int] = field(default_factory=dict)
    run_s: float = 0.0
    waiting: int = 0
    failed: int = 0
    refused: int = 0
    left: int = 0

    @property
    def calls(self) -> int:
        """How many calls were in these batches."""
        return sum(size * count for size, count in self.sizes.items())

    @property
    def mean_size(self) -> float:
        """How many calls a batch had on average; 0 before the first."""
        return self.calls / self.batches if self.batches else 0.0

    @property
    def mean_wait_s(self) -> float:
        """How long a call waited on average, in seconds; 0 before the first."""
        return self.wait_s / self.calls if self.batches else 0.0

    def size_percentile(self, percent: float) -> int:
        """Returns the size that so many percent of the batches do not exceed; 0 before the first.

        Raises:
            ConfigurationError: ``percent`` is not between 0 and 100.
        """
        return _percentile(self.sizes, percent) if self.sizes else 0

    def wait_percentile_s(self, percent: float) -> float:
        """Returns the time that so many percent of the calls waited at most, in seconds.

        It is too long by a quarter at most; 0 before the first batch.

        Raises:
            ConfigurationError: ``percent`` is not between 0 and 100.
        """
        found = _percentile(self.waits, percent) if self.waits else 0.0
        return min(found, self.longest_wait_s)


Number = TypeVar("Number", int, float)


def _percentile(counts: dict[Number, int], percent: float) -> Number:
    if not 0 <= percent <= 100:
        raise ConfigurationError(f"{percent} percent: pass a number from 0 to 100")
    needed = percent / 100 * sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= needed:
            break
    return value


_SORTED_AT: Final = 4096
"""Waits that are kept until they are counted, many at once."""


def _bound_s(key: int) -> float:
    """Returns the time at which a wait is counted: its binary exponent, and eighths of it."""
    return math.ldexp(key & 15, (key >> 4) - 3)


class Counts:
    """The statistics of a queue, while they grow; the queue keeps its threads apart."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._new_waits_s = array("d")
        self._waits: dict[int, int] = {}
        self._wait_s = self._longest_wait_s = self.run_s = 0.0
        self.failed = self.refused = self.left = 0

    def add_batch(self, waits_s: Sequence[float]) -> None:
        """Counts a batch by the times that its calls have waited. Hot path."""
        size = len(waits_s)
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self._new_waits_s.extend(waits_s)
        if len(self._new_waits_s) > _SORTED_AT:
            self._sort()

    def _sort(self) -> None:
        """Counts the waits since the last time by their bounds."""
        waits_s = np.frombuffer(self._new_waits_s)
        self._new_waits_s = array("d")
        mantissas, exponents = np.frexp(waits_s)
        keys = (exponents.astype(np.int64) << 4) + np.ceil(8 * mantissas).astype(np.int64)
        distinct, counts = np.unique(keys, return_counts=True)
        for key, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._waits[key] = self._waits.get(key, 0) + count
        self._wait_s += float(waits_s.sum())
        self._longest_wait_s = max(self._longest_wait_s, float(waits_s.max(initial=0.0)))

    def add_run(self, run_s: float, failed: int) -> None:
        """Counts the run of a batch."""
        self.run_s += run_s
        self.failed += failed

    def snapshot(self, waiting: int) -> BatchStatistics:
        """Returns the statistics so far."""
        self._sort()
        sizes = dict(self.sizes)
        waits: dict[float, int] = {}
        for key, count in self._waits.items():  # Of a bound there may be two keys.
            waits[_bound_s(key)] = waits.get(_bound_s(key), 0) + count
        return BatchStatistics(
            batches=sum(sizes.values()),
            sizes=sizes,
            wait_s=self._wait_s,
            longest_wait_s=self._longest_wait_s,
            waits=waits,
            run_s=self.run_s,
            waiting=waiting,
            failed=self.failed,
            refused=self.refused,
            left=self.left,
        )
