"""The rows, sides and targets of the benchmark of groups of different sizes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.frame import (
    COUNT,
    MEGABYTES,
    MICROSECONDS,
    MILLISECONDS,
    PERCENT,
    TORCH,
    WEFT,
    Form,
    Question,
    Row,
    Target,
    Unit,
    at_most,
    no_slower,
)
from benchmarks.scale.measuring import GROWTH, measure_sizes

SIZES = (2, 8, 32, 64)
COMPARED = 32
TIMES = Unit("x")

FIGURES = {
    "start": ("start-up of {} workers", MILLISECONDS),
    "stop": ("graceful shutdown of {} workers", MILLISECONDS),
    "call": ("rpc_sync to each of {} workers in turn", MICROSECONDS),
    "idle": ("CPU of the busiest of {} idle workers", PERCENT),
    "threads": ("threads of a worker among {}", COUNT),
    "caller sockets": ("sockets of a worker that called all {}", COUNT),
    "callee sockets": ("sockets of a worker called by 1 of {}", COUNT),
    "pss": ("memory of a worker among {}, shared parts shared out (PSS)", MEGABYTES),
    "private": ("memory that joining and calling adds, among {} (private)", MEGABYTES),
}

TARGETS: dict[tuple[str, int], Target] = {
    ("start", COMPARED): no_slower(),
    # 16 that run user functions, one that reads, the timer thread, the event loop, the helper for
    # large tensors, and the main thread.
    ("threads", COMPARED): at_most(21.0, "21, whatever the size"),
    ("idle", COMPARED): at_most(0.01, "1 % of a core"),
}


def _rows() -> Iterator[Row]:
    for size in SIZES:
        for figure, (title, unit) in FIGURES.items():
            target = TARGETS.get((figure, size))
            yield Row(
                f"{figure} {size}",
                title.format(size),
                operations=1,
                unit=unit,
                work=figure,
                targets=(target,) if target else (),
                is_short=size == COMPARED and figure != "pss",
            )
    for figure, growth in GROWTH.items():
        yield Row(
            f"{growth} {COMPARED}",
            f"{FIGURES[figure][0].format(COMPARED)}, as a multiple of that among 2",
            unit=TIMES,
            work=growth,
            targets=(at_most(1.0, "1x: constant"),),
            is_short=True,
        )


QUESTION = Question(
    "benchmarks.scale",
    "Groups of many workers",
    tuple(_rows()),
    sides=(TORCH, WEFT),
    about=(
        "All workers on this machine, forked from one warm process; torch RPC up to 32 of them. "
        "CPU: of all workers together."
    ),
    full=Form(rounds=3, placements=("not pinned",)),
    short=Form(rounds=2, placements=("not pinned",)),
    measure=measure_sizes,
)
