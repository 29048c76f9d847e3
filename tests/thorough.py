"""The share of seeds, examples and parameter combinations that a run tries.

``make test`` tries a sixtieth of the random programs and seeds, and a sixth of the examples of
Hypothesis. ``make check`` tries a tenth and all examples (``WEFT_TEST_SHARE=10``), ``make
thorough`` everything (``WEFT_TEST_THOROUGH=1``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

THOROUGH = os.environ.get("WEFT_TEST_THOROUGH", "0") != "0"
CHECKED = 10
"""The share that ``make check`` tries: one seed out of this many."""
SHARE = 1 if THOROUGH else int(os.environ.get("WEFT_TEST_SHARE", "60"))
"""The share that this run tries."""


def share(count: int, of: int | None = None) -> int:
    """Returns how many of ``count`` seeds this run tries, or a run with another share."""
    return -(-count // (SHARE if of is None else of))


def examples(count: int) -> int:
    """Returns how many of ``count`` examples this run tries; ``make check`` tries all of them."""
    return min(count, share(count * CHECKED))


def every(distance: int) -> int:
    """Returns the distance of the steps that this run tries; ``make check`` tries all of them."""
    return distance * max(1, SHARE // CHECKED)


def lots(count: int, size: int) -> list[range]:
    """Returns the seeds that this run tries in lots of ``size``, one lot for each test."""
    seeds = range(share(count))
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def spread(
    values: Sequence[Any], *others: Sequence[Any], all_from: int = 1
) -> list[tuple[Any, ...]]:
    """Returns the combinations of parameter values that this run tries.

    A run whose share is at least one out of ``all_from`` tries all of them; ``CHECKED`` stands for
    ``make check``. Another run pairs ``values`` with combinations of ``others``, both in turn. A
    tuple stands for the values of several parameters.
    """
    rest = list(itertools.product(*others))
    if all_from >= SHARE:
        chosen = list(itertools.product(values, rest))
    else:
        count = max(len(values), len(rest))
        chosen = list(itertools.islice(zip(itertools.cycle(values), itertools.cycle(rest)), count))
    return [_joined(first, *combined) for first, combined in chosen]


def _joined(*values: Any) -> tuple[Any, ...]:
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    return tuple(itertools.chain(*parts))
