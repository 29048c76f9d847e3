"""Text for people: seconds and bytes with units, and aligned tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torchweft import columns

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def seconds_text(seconds: float) -> str:
    """Returns a time with three digits and a unit from ns to s, such as ``12.3 ms``."""
    if seconds == 0:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= 0.9995 * size or unit == "ns":
            return f"{_three_digits(seconds / size)} {unit}"
    raise AssertionError("unreachable")


def bytes_text(count: int) -> str:
    """Returns a number of bytes with three digits and a binary unit, such as ``1.50 GiB``."""
    if count < 1024:
        return f"{count} B" if count else "0"
    power = min((count.bit_length() - 1) // 10, len(_BINARY_UNITS) - 1)
    return f"{_three_digits(count / 1024**power)} {_BINARY_UNITS[power]}"


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> str:
    """Returns lines with a column for each title; columns named in ``left`` are left-aligned."""
    return "\n".join(columns.aligned([header, *rows], [title in left for title in header]))


def layers_text(layers: range, names: Sequence[str]) -> str:
    """Returns a stage's layers, such as ``2-5 conv … pool``; ``names`` are theirs, or empty."""
    numbers = span_text(layers)
    if not names:
        return numbers
    return f"{numbers} {names[0]}" if len(names) == 1 else f"{numbers} {names[0]} … {names[-1]}"


def span_text(numbers: range) -> str:
    """Returns ``3`` for one number, ``3-5`` for several."""
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first}-{last}"


def _three_digits(value: float) -> str:
    decimals = max(0, 2 - math.floor(math.log10(value * 1.0005)))  # 9.996 becomes 10.0
    return f"{value:.{decimals}f}"
