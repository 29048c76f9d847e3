"""Says which parts take much longer than their kind does."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

LEAST_S = 1.0
"""Nobody is bothered about a part that runs for less than this."""

TIMES_THE_MEDIAN = 3.0
"""A part that runs for longer than this many medians is behind."""

REMEMBERED = 99
"""Parts whose durations are kept for each function: the last ones, as work may change."""


@dataclass(frozen=True)
class Straggler:
    """A part that is behind.

    Attributes:
        worker: Name of the worker that runs it.
        part: Its place in the order of results.
        name: The function of its map.
        seconds: For how long it has run.
        median_s: How long other parts of that function took.
    """

    worker: str
    part: int
    name: str
    seconds: float
    median_s: float


class Durations:
    """How long the parts of each function took."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Takes in a part that has ended."""
        self._seconds.setdefault(name, deque(maxlen=REMEMBERED)).append(seconds)

    def judge(self, worker: str, part: int, name: str, seconds: float) -> Straggler | None:
        """Returns the part as a straggler if it is one; never before a part of ``name`` ended."""
        if seconds <= LEAST_S or name not in self._seconds:
            return None
        median_s = statistics.median(self._seconds[name])
        if seconds <= TIMES_THE_MEDIAN * median_s:
            return None
        return Straggler(worker, part, name, seconds, median_s)
