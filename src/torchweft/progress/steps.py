"""Counts the steps of a program's loop; estimates their rate and the time that is left."""

from __future__ import annotations

import math
from collections.abc import Mapping

MEMORY_S = 30.0
"""How far back the rate looks, about."""

LEAST_WEIGHT = 0.8
"""What is left of the past after one step, however long that took: about five steps count."""


class Steps:
    """The steps of one loop.

    Args:
        total: How many there will be, if that is known.
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
        """Takes ``now`` for the begin of the first step."""
        self._last = now

    def add(self, count: int, figures: Mapping[str, str], now: float) -> None:
        """Takes in steps that are done, with figures to show until newer ones come."""
        elapsed_s, self._last = now - self._last, now
        weight = max(LEAST_WEIGHT, math.exp(-elapsed_s / MEMORY_S))
        self._weighted_count = weight * self._weighted_count + count
        self._weighted_s = weight * self._weighted_s + elapsed_s
        self.count += count
        self.figures.update(figures)

    @property
    def per_s(self) -> float | None:
        """Steps in a second, lately; None before the first one."""
        return self._weighted_count / self._weighted_s if self._weighted_s else None

    def left_s(self, now: float) -> float | None:
        """Returns the seconds that are left, as far as that can be known."""
        if not self.per_s or self.total is None:
            return None
        left = max(0, self.total - self.count)
        # A step that takes longer than others says nothing about those that follow it.
        of_this_step = min(1.0, left, self.per_s * (now - self._last))
        return (left - of_this_step) / self.per_s


def readable_figure(value: object) -> str:
    """Writes a figure with four digits, a scalar tensor too."""
    if isinstance(value, int | str):
        return str(value)
    try:
        return format(value, ".4g")
    except (TypeError, ValueError):
        return str(value)
