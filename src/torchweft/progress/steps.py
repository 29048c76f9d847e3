"""Counts the steps of a program's loop; estimates their rate and the remaining time."""

from __future__ import annotations

import math
from collections.abc import Mapping

MEMORY_S = 30.0
"""Time constant of the moving average of the rate."""

LEAST_WEIGHT = 0.8
"""Minimum weight of the past after one step, however long the step took: about five steps count."""


class Steps:
    """The steps of one loop.

    Args:
        total: How many steps there will be, if that is known.
        now: The time, in seconds.
    """

    def __init__(self, total: int | None, now: float) -> None:
        self.total = total
        self.count = 0
        self.figures: dict[str, str] = {}
        self._last = now
        self._weighted_count = 0.0
        self._weighted_s = 0.0

    def begin(self, now: float) -> None:
        """Sets ``now`` as the start of the first step."""
        self._last = now

    def add(self, count: int, figures: Mapping[str, str], now: float) -> None:
        """Adds completed steps, with figures to show until newer values come."""
        elapsed_s, self._last = now - self._last, now
        weight = max(LEAST_WEIGHT, math.exp(-elapsed_s / MEMORY_S))
        self._weighted_count = weight * self._weighted_count + count
        self._weighted_s = weight * self._weighted_s + elapsed_s
        self.count += count
        self.figures.update(figures)

    @property
    def per_s(self) -> float | None:
        """The recent steps per second; None before the first step."""
        return self._weighted_count / self._weighted_s if self._weighted_s else None

    def left_s(self, now: float) -> float | None:
        """Returns the remaining seconds; None if the rate or the total is unknown."""
        if not self.per_s or self.total is None:
            return None
        left = max(0, self.total - self.count)
        # A step that takes longer than others says nothing about the following steps.
        of_this_step = min(1.0, left, self.per_s * (now - self._last))
        return (left - of_this_step) / self.per_s


def readable_figure(value: object) -> str:
    """Formats a figure with four digits; also a scalar tensor."""
    if isinstance(value, int | str):
        return str(value)
    try:
        return format(value, ".4g")
    except (TypeError, ValueError):
        return str(value)
