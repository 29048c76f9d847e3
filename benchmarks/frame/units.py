"""Units of measured numbers: times, rates, counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Formats measured numbers, which are seconds per operation unless the work says otherwise.

    Attributes:
        name: Text after the number.
        scale: Factor applied to the number.
        is_rate: Whether to show the amount per second: amount / seconds.
    """

    name: str
    scale: float = 1.0
    is_rate: bool = False

    def shown(self, measured: float, amount: float = 1.0) -> float:
        """Returns the number to show; for a rate, one operation moves ``amount``."""
        if not self.is_rate:
            return measured * self.scale
        return amount / measured * self.scale if measured else 0.0

    def text(self, measured: float, amount: float = 1.0) -> str:
        """Returns the number to show with its unit."""
        return f"{number(self.shown(measured, amount))} {self.name}".strip()


MICROSECONDS = Unit("us", 1e6)
MILLISECONDS = Unit("ms", 1e3)
SECONDS = Unit("s")
GIGABYTES_PER_S = Unit("GB/s", 1e-9, is_rate=True)
MEGABYTES = Unit("MB", 1e-6)
STEPS_PER_S = Unit("steps/s", is_rate=True)
PERCENT = Unit("%", 100.0)
COUNT = Unit("")


def number(value: float) -> str:
    """Returns about three significant digits, with commas between thousands."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    text = f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
    return text.rstrip("0").rstrip(".")
