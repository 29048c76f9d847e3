"""The seeds that a simulation tries, and the command in a failure that replays its seed.

``WEFT_TEST_SEED=<seed>`` runs one seed alone and prints its trace if it fails.
``WEFT_TEST_SEEDS`` sets how many seeds each test tries, for a long run: ``WEFT_TEST_SEEDS=10000
pytest -n 2 --timeout 0``. Without it, ``tests/thorough.py`` sets the share that is tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

from tests.thorough import share

R = TypeVar("R")
BATCH = 50
MOST_BATCHES = 200
"""A test with very many seeds uses larger batches."""

LINES_SHOWN = 400


def batches(count: int) -> list[range]:
    """Returns the seeds that a test tries: ``count`` in a thorough run, else a share of them."""
    chosen = os.environ.get("WEFT_TEST_SEED")
    if chosen is not None:
        return [range(int(chosen), int(chosen) + 1)]
    count = int(os.environ.get("WEFT_TEST_SEEDS", share(count)))
    size = max(BATCH, count // MOST_BATCHES)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def name_of(batch: range) -> str:
    """Names a batch for pytest."""
    return f"from-seed-{batch.start}"


def try_seeds(
    batch: range,
    make: Callable[[int], R],
    run: Callable[[R], object],
    trace_of: Callable[[R], Iterable[object]] = lambda made: (),
) -> None:
    """Runs every seed of a batch; a failure says how to run its seed again.

    Args:
        batch: The seeds.
        make: Makes the run of a seed.
        run: Runs it.
        trace_of: Returns the trace of a run.
    """
    for seed in batch:
        made: list[R] = []
        try:
            made.append(make(seed))
            run(made[0])
        except Exception as error:
            if len(batch) == 1:
                for line in [line for each in made for line in trace_of(each)][-LINES_SHOWN:]:
                    print(line)
                raise
            test = os.environ.get("PYTEST_CURRENT_TEST", "").split("[")[0].replace(" (call)", "")
            replay = f"WEFT_TEST_SEED={seed} pytest '{test}'"
            pytest.fail(f"seed {seed}: {error!r}; replay it with {replay}")
