"""The share of random programs and parameter combinations that an ordinary run tries.

``make thorough`` tries all of them (``WEFT_TEST_THOROUGH=1``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

THOROUGH = os.environ.get("WEFT_TEST_THOROUGH", "0") != "0"
SHARE = 10
"""An ordinary run tries one seed out of this many."""


def share(count: int) -> int:
    """Returns how many of ``count`` seeds this run tries."""
    return count if THOROUGH else -(-count // SHARE)


def lots(count: int, size: int) -> list[range]:
    """Returns the seeds that this run tries in lots of ``size``, one lot for each test."""
    seeds = range(share(count))
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def spread(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the combinations of parameter values that this run tries.

    A thorough run tries all of them. An ordinary run pairs ``values`` with combinations of
    ``others``, both in turn. A tuple stands for the values of several parameters.
    """
    rest = list(itertools.product(*others))
    if THOROUGH:
        chosen = list(itertools.product(values, rest))
    else:
        count = max(len(values), len(rest))
        chosen = list(itertools.islice(zip(itertools.cycle(values), itertools.cycle(rest)), count))
    return [_joined(first, *combined) for first, combined in chosen]


def _joined(*values: Any) -> tuple[Any, ...]:
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    return tuple(itertools.chain(*parts))
