"""Targets of rows: their demands, and whether a ratio meets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.frame.figures import FigureName, Ratio
from benchmarks.frame.units import number


@dataclass(frozen=True)
class Target:
    """A demand on one figure of ours.

    Attributes:
        against: The side that ours is compared with; ``bound`` for an absolute demand.
        bound: The smallest ratio (theirs divided by ours) that meets the demand; for an absolute
            demand, the largest figure.
        figure: The figure that is compared.
        text: The demand, for the table.
        is_inverse: Whether to show ours divided by theirs instead.
    """

    against: Literal["torch", "limit", "bound"]
    bound: float
    figure: FigureName
    text: str
    is_inverse: bool = False

    def is_met_by(self, ratio: Ratio) -> bool:
        return ratio.median >= self.bound

    def shown(self, ratio: Ratio) -> str:
        """Returns the ratio as text with its extremes, worst first; inverted if ``is_inverse``."""
        values = [ratio.median, ratio.worst, ratio.best]
        if self.is_inverse:
            values = [1 / value for value in values if value]
        median, worst, best = map(number, values)
        return f"{median}x ({worst}-{best})"


def times_faster(factor: float, figure: FigureName = "median") -> Target:
    """Demands that ours takes ``factor`` times less than torch RPC: time, p99 or CPU."""
    what = {"median": "faster than", "p99": "lower p99 than", "cpu": "less CPU than"}[figure]
    return Target("torch", factor, figure, f"at least {number(factor)}x {what} torch")


def no_slower() -> Target:
    """Demands that ours takes no longer than torch RPC."""
    return Target("torch", 1.0, "median", "no slower than torch")


def no_more_cpu() -> Target:
    """Demands that ours takes no more CPU time than torch RPC."""
    return Target("torch", 1.0, "cpu", "no more CPU than torch")


def at_most_times_limit(factor: float) -> Target:
    """Demands that ours takes at most ``factor`` times as long as the raw limit."""
    text = f"at most {number(factor)}x the limit"
    return Target("limit", 1 / factor, "median", text, is_inverse=True)


def at_least_of_limit(factor: float) -> Target:
    """Demands that ours reaches ``factor`` of the raw limit's rate."""
    return Target("limit", factor, "median", f"at least {number(factor)}x the limit")


def at_most(bound: float, text: str) -> Target:
    """Demands that ours, as measured (seconds, bytes, a count), is at most ``bound``."""
    return Target("bound", bound, "median", f"at most {text}")
