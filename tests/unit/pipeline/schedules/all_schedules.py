"""Draws schedules, costs and tables for the property tests, and runs tables in another way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from torchweft.pipeline.schedules import (
    Action,
    Costs,
    Kind,
    Schedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleNaive,
    SchedulePipeDream,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    Table,
    Weights,
)

AnySchedule = Schedule | SchedulePipeDream

LOOPED = [ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble]
V_SHAPED = [ScheduleZBVZeroBubble, ScheduleDualPipeV]
REPLICATED = [ScheduleGPipe, Schedule1F1B]
SINGLE = [ScheduleNaive, ScheduleZBH1, *REPLICATED]


def fits_rounds(n_microbatches: int, n_workers: int) -> bool:
    return n_microbatches % max(1, n_microbatches // n_workers) == 0


@st.composite
def schedules(draw: st.DrawFn, most_workers: int = 8) -> tuple[AnySchedule, int]:
    """Draws a schedule and a number of workers that fit each other."""
    kind = draw(st.sampled_from([*SINGLE, *LOOPED, *V_SHAPED, SchedulePipeDream]))
    p = draw(st.integers(1, most_workers))
    if kind in V_SHAPED:
        return kind(draw(st.integers(2 * p, 4 * p))), p
    m = draw(st.integers(1, 4 * p))
    if kind in LOOPED:
        is_fitting = kind is ScheduleLoopedBFS or fits_rounds(m, p)
        return kind(m if is_fitting else m - m % p, draw(st.integers(1, 3))), p
    if kind is SchedulePipeDream:
        return SchedulePipeDream(m, draw(st.sampled_from(Weights))), p
    return kind(m), p


def every_schedule(p: int) -> Iterator[AnySchedule]:
    """Returns every schedule with every fitting number of micro-batches up to ``4p``."""
    for m in range(1, 4 * p + 1):
        yield from (kind(m) for kind in SINGLE)
        yield from (SchedulePipeDream(m, weights) for weights in Weights)
        yield from (kind(m) for kind in V_SHAPED if m >= 2 * p)
        for kind, v in itertools.product(LOOPED, (1, 2, 3)):
            if kind is ScheduleLoopedBFS or fits_rounds(m, p):
                yield kind(m, v)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[AnySchedule, int]:
    """Draws a schedule with replicas and its number of workers."""
    kind = draw(st.sampled_from([*REPLICATED, SchedulePipeDream]))
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    m = draw(st.integers(max(replicas), 24))
    if kind is SchedulePipeDream:
        return SchedulePipeDream(m, draw(st.sampled_from(Weights)), replicas), sum(replicas)
    return kind(m, replicas), sum(replicas)


@st.composite
def whole_costs(draw: st.DrawFn, table: Table) -> Costs:
    """Draws durations that are whole numbers, an update's possibly none."""
    durations = {
        (stage, kind): float(draw(st.integers(0 if kind is Kind.UPDATE else 1, 5)))
        for stage in range(table.n_stages)
        for kind in Kind
    }
    return Costs(durations, float(draw(st.integers(0, 3))))


def rerun(
    rows: Sequence[Sequence[Action]], edges: Sequence[tuple[int, int]], costs: Costs
) -> list[list[tuple[float, float]]] | None:
    """Returns the start and end of each action, or None if a worker waits for ever.

    In contrast to the product this passes over all rows, and moves every action to the latest time
    that some rule demands, until no action moves any more.
    """
    where = {
        (a.stage, a.kind, a.microbatch): (worker, place)
        for worker, row in enumerate(rows)
        for place, a in enumerate(row)
        if a.kind is not Kind.UPDATE
    }

    def backward(stage: int, part: Kind, microbatch: int) -> tuple[int, int]:
        whole = where.get((stage, Kind.BACKWARD, microbatch))
        return where[stage, part, microbatch] if whole is None else whole

    def before(action: Action) -> list[tuple[int, int]]:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [where[u, Kind.FORWARD, microbatch] for u, v in edges if v == stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return [where[stage, Kind.BACKWARD_INPUT, microbatch]]
        if action.kind is Kind.UPDATE:
            return [backward(stage, Kind.BACKWARD_WEIGHT, b) for b in range(microbatch + 1)]
        after = [backward(v, Kind.BACKWARD_INPUT, microbatch) for u, v in edges if u == stage]
        return [where[stage, Kind.FORWARD, microbatch], *after]

    needs = [[before(action) for action in row] for row in rows]
    longest = [[costs.of(action) for action in row] for row in rows]
    limit = sum(map(sum, longest)) + costs.latency_s * sum(map(len, rows))
    ends = [[0.0] * len(row) for row in rows]
    has_moved = True
    while has_moved:
        has_moved = False
        for worker, row in enumerate(rows):
            free = 0.0
            for place in range(len(row)):
                arrivals = [
                    ends[w][n] + (costs.latency_s if w != worker else 0.0)
                    for w, n in needs[worker][place]
                ]
                free = max(free, *arrivals, 0.0) + longest[worker][place]
                has_moved = has_moved or free > ends[worker][place]
                ends[worker][place] = max(free, ends[worker][place])
                if free > limit:
                    return None
    return [
        [(end - length, end) for end, length in zip(*pair, strict=True)]
        for pair in zip(ends, longest, strict=True)
    ]
