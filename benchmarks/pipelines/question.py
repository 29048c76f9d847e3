"""The rows, sides and targets of the benchmark of pipelines."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.frame import (
    MICROSECONDS,
    MILLISECONDS,
    Form,
    Question,
    Row,
    Side,
    at_most,
    no_slower,
)
from benchmarks.frame.figures import Round, Rounds
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import Cores
from benchmarks.pipelines.cases import CASES, MICROBATCHES, SCHEDULES, SIZES, WORKERS

ARITHMETIC = "arithmetic"
OVERHEAD = "overhead of "
STEPS = {"small": 100, "64k": 50, "1m": 10}
WITH_BOUND = ("gpipe", "1f1b")
SMALL_BOUND_S = 240e-6
"""The overhead of a micro-batch on all workers together, with small tensors."""
STAGE_BOUND_S = 250e-6
"""The overhead of a micro-batch in one stage, with tensors of 64 KiB."""


def _rows() -> Iterator[Row]:
    for name in CASES:
        schedule, size = name.split()
        title = f"{SCHEDULES[schedule][0]}, {SIZES[size][0]}"
        yield Row(
            name,
            f"a step of {title}",
            operations=STEPS[size],
            unit=MILLISECONDS,
            limit=ARITHMETIC,
            targets=(no_slower(),),
            is_short=size == "small",
            warm_up=5,
            check=f"{name} losses",
        )
        bounds = {"small": SMALL_BOUND_S, "64k": STAGE_BOUND_S * CASES[name].n_stages}
        bound = bounds.get(size) if schedule in WITH_BOUND or size == "64k" else None
        yield Row(
            OVERHEAD + name,
            f"CPU beyond the arithmetic, a micro-batch: {title}",
            unit=MICROSECONDS,
            targets=(at_most(bound, f"{bound * 1e6:.0f} us"),) if bound else (),
            is_short=size == "small",
        )


def measure_pipelines(question: Question, options: Namespace, cores: Cores) -> Rounds:
    """Measures steps; takes from their CPU time the overhead of a micro-batch."""
    names = {row.name.removeprefix(OVERHEAD) for row in options.rows}
    steps = [row for row in question.rows if row.name in names]
    rounds = dict(
        measure(
            dataclasses.replace(question, measure=None),
            Namespace(**{**vars(options), "rows": steps}),
            cores,
        )
    )
    for name in names:
        alone = rounds.get((ARITHMETIC, name), ())
        for side in ("torch", "weft"):
            rounds[side, OVERHEAD + name] = [
                Round([(of_side.cpu_s - of_alone.cpu_s) / MICROBATCHES])
                for of_side, of_alone in zip(rounds.get((side, name), ()), alone, strict=False)
            ]
    return rounds


QUESTION = Question(
    "benchmarks.pipelines",
    "Pipelines",
    tuple(_rows()),
    sides=(
        Side("torch", runner="forked", api="torch"),
        Side("weft", runner="forked", api="weft"),
        Side(ARITHMETIC, runner="forked"),
    ),
    about=(
        f"A step of {MICROBATCHES} micro-batches on {WORKERS} workers; torch is "
        "torch.distributed.pipelining with gloo. Losses must be equal on both sides. CPU: of all "
        "processes."
    ),
    full=Form(rounds=8, placements=("a core each", "not pinned")),
    short=Form(rounds=3, placements=("a core each",)),
    measure=measure_pipelines,
)
