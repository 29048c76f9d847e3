"""The measured pipelines: schedules and sizes, by name. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

WORKERS = 2
MICROBATCHES = 8
CHECKED_STEPS = 5
"""Steps with an optimizer whose losses must be the same on all sides."""


class Case(NamedTuple):
    """A pipeline.

    Attributes:
        schedule: Name of the schedule.
        n_stages: The number of stages.
        rows: The samples of a micro-batch.
        width: The features of a sample, before and after each stage.
    """

    schedule: str
    n_stages: int
    rows: int
    width: int


# By name: the title, and the number of stages.
SCHEDULES = {"gpipe": ("GPipe", 2), "1f1b": ("1F1B", 2), "interleaved": ("interleaved 1F1B", 4)}

# By name: the title, and rows and width of the tensors between stages, with 4 bytes an element.
SIZES = {
    "small": ("tensors of 512 bytes", 8, 16),
    "64k": ("tensors of 64 KiB", 128, 128),
    "1m": ("tensors of 1 MiB", 2048, 128),
}

CASES = {
    f"{schedule} {size}": Case(schedule, n_stages, rows, width)
    for size, (_, rows, width) in SIZES.items()
    for schedule, (_, n_stages) in SCHEDULES.items()
}
