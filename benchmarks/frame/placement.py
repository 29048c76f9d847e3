"""Assigns cores to the workers of a side."""

from __future__ import annotations

import os
from collections.abc import Callable

Cores = Callable[[int], set[int]]
"""Returns the cores of a worker by its rank."""


def placements() -> dict[str, Cores]:
    """Returns the placements that this machine allows, by name."""
    cores = sorted(os.sched_getaffinity(0))
    chosen: dict[str, Cores] = {
        "not pinned": lambda rank: set(cores),
        "one core": lambda rank: {cores[0]},
    }
    if len(cores) > 1:
        # With more workers than cores, workers share the cores in turn.
        chosen = {"a core each": lambda rank: {cores[rank % len(cores)]}, **chosen}
    return chosen
