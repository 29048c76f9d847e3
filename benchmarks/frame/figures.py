"""Statistics of a work's rounds: median, p99, CPU time, and ratios between two sides."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FigureName = Literal["median", "p99", "cpu"]

# With fewer samples, the one value in a hundred was not seen.
SAMPLES_FOR_P99 = 100


@dataclass(frozen=True)
class Round:
    """The measurements of one side in one round of one work.

    Attributes:
        values: Seconds of each operation. If operations overlap or come in steps, seconds of each
            run divided by its operations. Works that are not timings give other numbers.
        cpu_s: CPU time of all processes of the side per operation; 0 if it was not measured.
        operations: Number of operations in one run.
    """

    values: list[float]
    cpu_s: float = 0.0
    operations: int = 1

    def figure(self, name: FigureName) -> float | None:
        """Returns a figure of this round alone, or None if the round does not have it."""
        if name == "cpu":
            return self.cpu_s or None
        return statistics.median(self.values) if name == "median" else p99([self])


Rounds = Mapping[tuple[str, str], Sequence[Round]]
"""The rounds of each (side, row), in the order in which they were measured."""


@dataclass(frozen=True)
class Figures:
    """The figures of one side and row over all rounds; None for a figure that is not known."""

    median: float
    p99: float | None
    cpu: float | None

    def named(self, name: FigureName) -> float | None:
        return {"median": self.median, "p99": self.p99, "cpu": self.cpu}[name]


def figures_of(rounds: Sequence[Round]) -> Figures:
    """Summarizes the rounds of one side and row; p99 and median are over all their values."""
    cpu_s = statistics.median(one.cpu_s for one in rounds)
    median = statistics.median(value for one in rounds for value in one.values)
    return Figures(median, p99(rounds), cpu_s or None)


def p99(rounds: Sequence[Round]) -> float | None:
    """Returns the value that 99 of 100 operations did not exceed (nearest rank).

    None if operations were not timed one by one, or too few to have seen one in a hundred.
    """
    values = sorted(value for one in rounds for value in one.values)
    if len(values) < SAMPLES_FOR_P99 or any(one.operations > 1 for one in rounds):
        return None
    rank = -(-len(values) * 99 // 100)
    return values[rank - 1]


@dataclass(frozen=True)
class Ratio:
    """Ours against another side: how many times less time (or CPU, memory) ours takes.

    Attributes:
        median: Median of the ratios of the single rounds.
        worst: The smallest of these ratios.
        best: The largest of these ratios.
    """

    median: float
    worst: float
    best: float


def ratio_of(
    others: Sequence[Round], ours: Sequence[Round], figure: FigureName = "median"
) -> Ratio | None:
    """Compares two sides round by round, since a round meets the same machine load on both."""
    pairs = [
        (other.figure(figure), own.figure(figure))
        for other, own in zip(others, ours, strict=False)  # a side that failed has fewer
    ]
    each = [other / own for other, own in pairs if other is not None and own]
    return Ratio(statistics.median(each), min(each), max(each)) if each else None
