from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from tests.unit.pipeline.schedules.all_schedules import (
    AnySchedule,
    replicated,
    rerun,
    schedules,
    whole_costs,
)
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.schedules import (
    Costs,
    Kind,
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
    TableError,
    Timeline,
    predict,
)
from torchweft.pipeline.schedules.table import chain


def timeline(schedule: AnySchedule, n_workers: int) -> Timeline:
    """Predicts with a forward pass of 1 and a backward pass of 1 + 1 for a worker's whole share."""
    table = schedule.table(n_workers)
    share = n_workers / table.n_stages
    costs = Costs.uniform(table.n_stages, forward_s=share, input_s=share, weight_s=share)
    return predict(table, costs)


@pytest.mark.parametrize(
    ("schedule", "idle_percent"),
    [
        (ScheduleGPipe(8), 27.3),
        (Schedule1F1B(8), 27.3),
        (ScheduleLoopedBFS(8), 15.8),
        (ScheduleInterleaved1F1B(8), 15.8),
        (ScheduleZBH1(8), 11.1),
        (ScheduleInterleavedZeroBubble(8), 5.9),
        (ScheduleZBVZeroBubble(8), 5.9),
        (ScheduleDualPipeV(8), 5.9),
        (SchedulePipeDream(80), 3.6),
        (ScheduleNaive(8), 75.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_idle_share_of_4_workers(schedule: AnySchedule, idle_percent: float) -> None:
    assert round(100 * timeline(schedule, 4).idle_share, 1) == idle_percent


def test_replicas_of_a_long_stage_keep_everybody_busy() -> None:
    table = SchedulePipeDream(80, replicas=(3, 1)).table(4)
    lengths = {(0, Kind.FORWARD): 3, (0, Kind.BACKWARD): 6, (0, Kind.UPDATE): 0}
    lengths |= {(1, Kind.FORWARD): 1, (1, Kind.BACKWARD): 2, (1, Kind.UPDATE): 0}
    assert predict(table, Costs(lengths)).idle_share < 0.04


def ends_by_formula(p: int, m: int, v: int) -> list[tuple[AnySchedule, int]]:
    """Returns schedules and when they end, if every pass of a stage and each half takes 1."""
    found: list[tuple[AnySchedule, int]] = [
        (ScheduleNaive(m), 3 * m * p),
        (ScheduleGPipe(m), 3 * (m + p - 1)),
        (Schedule1F1B(m), 3 * (m + p - 1)),
        (SchedulePipeDream(m), 3 * (m + p - 1)),
    ]
    if m >= p:
        found += [(ScheduleZBH1(m), 3 * m + p - 1), (ScheduleLoopedBFS(m, v), 3 * (v * m + p - 1))]
    if m % p == 0:
        found += [
            (ScheduleInterleaved1F1B(m, v), 3 * (v * m + p - 1)),
            (ScheduleInterleavedZeroBubble(m, v), 3 * v * m + p - 1),
        ]
    if m >= 2 * p:
        found += [(kind(m), 6 * m + p - 1) for kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV)]
    return found


@settings(max_examples=share(100))
@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 7), st.integers(2, 3))
def test_the_known_formulas_hold_exactly(p: int, rounds: int, more: int, v: int) -> None:
    m = max(1, rounds * p + more % p)
    for schedule, end in ends_by_formula(p, m, v):
        table = schedule.table(p)
        assert predict(table, Costs.uniform(table.n_stages)).makespan_s == end, schedule


@pytest.mark.parametrize(
    ("schedule", "peaks"),
    [
        (ScheduleNaive(16), (1, 1, 1, 1)),
        (ScheduleGPipe(16), (16, 16, 16, 16)),
        (Schedule1F1B(16), (4, 3, 2, 1)),
        (Schedule1F1B(2), (2, 2, 2, 1)),
        (SchedulePipeDream(16), (4, 3, 2, 1)),
        (ScheduleZBH1(16), (4, 4, 4, 4)),
        (ScheduleLoopedBFS(16), (32, 32, 32, 32)),
        (ScheduleInterleaved1F1B(16), (11, 9, 7, 5)),
        (ScheduleInterleavedZeroBubble(16), (8, 8, 8, 8)),
        (ScheduleZBVZeroBubble(16), (8, 8, 8, 8)),
        (ScheduleDualPipeV(16), (9, 9, 9, 9)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_peak_activations_of_4_workers(schedule: AnySchedule, peaks: tuple[int, ...]) -> None:
    assert timeline(schedule, 4).peak_activations == peaks


@settings(max_examples=share(100))
@given(st.integers(1, 8), st.integers(0, 16))
def test_zbv_keeps_no_more_than_the_first_worker_of_1f1b(p: int, more: int) -> None:
    m = 2 * p + more % (2 * p + 1)
    first = timeline(Schedule1F1B(m), p).peak_activations[0]
    assert max(timeline(ScheduleZBVZeroBubble(m), p).peak_activations) == 2 * first == 2 * p


@settings(max_examples=share(100))
@given(st.one_of(schedules(4), replicated()), st.data())
def test_times_are_those_of_another_model(drawn: Any, data: st.DataObject) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    costs = data.draw(whole_costs(table))
    expected = rerun(table.rows, chain(table.n_stages), costs)
    found = [[(start, end) for _, start, end in row] for row in predict(table, costs).spans]
    assert found == expected


def test_a_message_takes_time_only_between_workers() -> None:
    two = predict(Schedule1F1B(1).table(2), Costs.uniform(2, latency_s=0.25))
    assert two.makespan_s == 6 + 2 * 0.25
    one = predict(ScheduleLoopedBFS(1, 2).table(1), Costs.uniform(2, latency_s=0.25))
    assert one.makespan_s == 6


def test_an_update_takes_the_time_that_is_given() -> None:
    costs = Costs.uniform(1, update_s=0.5)
    assert predict(SchedulePipeDream(4).table(1), costs).makespan_s == 4 * 3.5


def test_a_branch_runs_beside_another() -> None:
    table = Table.from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n3F0,3B0")
    diamond = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert predict(table, Costs.uniform(4), diamond).makespan_s == 9
    for longer in (1, 2):
        lengths = {**Costs.uniform(4).duration_s, (longer, Kind.FORWARD): 5.0}
        assert predict(table, Costs(lengths), diamond).makespan_s == 13
    assert predict(table, Costs.uniform(4)).makespan_s == 12


def test_a_table_that_stops_is_refused() -> None:
    with pytest.raises(TableError, match="1B0 waits for 1F0"):
        predict(Table.from_csv("0F0,0B0\n1B0,1F0"), Costs.uniform(2))


def test_costs_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"no duration for 1F0: set duration_s\[1, Kind"):
        predict(Schedule1F1B(1).table(2), Costs.uniform(1))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match=r"latency_s is .*; pass a number"):
            Costs({}, wrong)
        with pytest.raises(ConfigurationError, match=r"FORWARD.* is .*; pass a number"):
            Costs.uniform(2, forward_s=wrong)
    with pytest.raises(
        ArgumentTypeError, match=r"duration_s\[1, Kind.UPDATE\] is '1', a str; pass"
    ):
        Costs({(1, Kind.UPDATE): "1"})  # type: ignore[dict-item]


def test_nothing_is_idle_in_no_time() -> None:
    free = Costs.uniform(2, forward_s=0, input_s=0, weight_s=0)
    assert predict(Schedule1F1B(2).table(2), free).idle_share == 0.0
