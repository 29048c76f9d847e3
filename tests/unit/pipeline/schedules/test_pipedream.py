"""Tests asynchronous schedules, and the versions of the parameters that they use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from tests.unit.pipeline.schedules.all_schedules import AnySchedule, replicated, schedules
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules import (
    Kind,
    ScheduleError,
    SchedulePipeDream,
    Table,
    Versions,
    Weights,
    check,
    versions_of,
)


@settings(max_examples=share(200))
@given(
    st.sampled_from(Weights),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_parts_and_drain_are_the_table(
    weights: Weights, replicas: list[int], counts: list[int]
) -> None:
    schedule = SchedulePipeDream(None, weights, tuple(replicas))
    counts[-1] += max(replicas)
    p, n = sum(replicas), sum(counts)
    rows: list[tuple[object, ...]] = [()] * p
    first = 0
    for count in counts:
        part = schedule.rows(p, first, count)
        first += count
        assert all(action.microbatch < first for row in part for action in row)
        rows = [(*row, *more) for row, more in zip(rows, part, strict=True)]
    rows = [(*row, *more) for row, more in zip(rows, schedule.drain(p, n), strict=True)]
    assert tuple(rows) == schedule.table(p, n).rows


def test_a_part_far_from_the_start_is_as_short_as_any() -> None:
    schedule = SchedulePipeDream(replicas=(2, 1, 1))
    part = schedule.rows(4, 10**12, 6)
    assert [len(row) for row in part] == [9, 9, 18, 18]
    assert str(part[3][0]) == f"2F{10**12}"


def test_a_row_is_1f1b_with_updates() -> None:
    table = SchedulePipeDream(4).table(3)
    assert table.to_csv() == (
        "0F0,0F1,0F2,0B0,0U0,0F3,0B1,0U1,0B2,0U2,0B3,0U3\n"
        "1F0,1F1,1B0,1U0,1F2,1B1,1U1,1F3,1B2,1U2,1B3,1U3\n"
        "2F0,2B0,2U0,2F1,2B1,2U1,2F2,2B2,2U2,2F3,2B3,2U3\n"
    )


def test_2bw_updates_after_as_many_minibatches_as_workers() -> None:
    def updated(schedule: SchedulePipeDream) -> list[int]:
        row = schedule.table(4).rows[0]
        return [action.microbatch for action in row if action.kind is Kind.UPDATE]

    assert updated(SchedulePipeDream(10, "2bw")) == [3, 7, 9]
    assert updated(SchedulePipeDream(10, "2bw", accumulate=5)) == [4, 9]
    assert updated(SchedulePipeDream(10, "stashing", accumulate=3)) == [2, 5, 8, 9]


def test_accumulation_fits_workers_and_replicas() -> None:
    with pytest.raises(ScheduleError) as caught:
        SchedulePipeDream(40, "2bw", accumulate=3).table(4)
    assert str(caught.value) == (
        "SchedulePipeDream (2bw) on 4 workers (4 stages) cannot have an update for 3 minibatches; "
        "pass a multiple of 1 that is at least 4"
    )
    schedule = SchedulePipeDream(40, replicas=(2, 3), accumulate=9)
    with pytest.raises(ScheduleError, match=r"pass a multiple of 6 that is at least 6$"):
        schedule.rows(5, 0, 6)
    check(SchedulePipeDream(40, replicas=(2, 3), accumulate=12).table(5))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"weights is 'best'; pass one of .*'stashing'"):
        SchedulePipeDream(4, "best")
    with pytest.raises(ConfigurationError, match="accumulate is 0; pass 1 or more"):
        SchedulePipeDream(4, accumulate=0)
    with pytest.raises(ConfigurationError, match="number of minibatches is not given; pass n_mini"):
        SchedulePipeDream().table(2)
    with pytest.raises(ScheduleError, match=r"cannot have 2 minibatches; .*; pass 3 or more"):
        SchedulePipeDream(2, replicas=(3, 1)).table(4)


def held_by_sets(table: Table, used: Versions) -> tuple[int, ...]:
    """Counts the versions that are needed at each place of each row, as a set."""
    peaks = []
    for row in table.rows:
        peak = 0
        for place in range(len(row) + 1):
            for stage in {action.stage for action in row}:
                updates = [a for a in row[:place] if a.kind is Kind.UPDATE and a.stage == stage]
                to_come = {
                    used.used[a.stage, a.microbatch]
                    for a in row[place:]
                    if a.kind is not Kind.UPDATE and a.stage == stage
                }
                needed = {version for version in to_come if version <= len(updates)}
                peak = max(peak, len(needed | {len(updates)}))
        peaks.append(peak)
    return tuple(peaks)


@settings(max_examples=share(100))
@given(st.integers(1, 8), st.integers(1, 30))
def test_versions_used_follow_the_papers(p: int, n: int) -> None:
    stashing = versions_of(SchedulePipeDream(n).table(p)).used
    vertical = versions_of(SchedulePipeDream(n, "vertical-sync").table(p)).used
    double = versions_of(SchedulePipeDream(n, "2bw").table(p)).used
    for stage in range(p):
        for b in range(n):
            assert stashing[stage, b] == max(0, b - (p - 1 - stage))
            assert vertical[stage, b] == max(0, b - (p - 1))
            assert double[stage, b] == max(0, b // p - 1)


@settings(max_examples=share(200))
@given(st.one_of(schedules(), replicated()))
def test_the_schedule_knows_the_versions_of_its_table(drawn: tuple[AnySchedule, int]) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    versions = versions_of(table)
    assert versions.held == held_by_sets(table, versions)
    for (stage, minibatch), version in versions.used.items():
        assert version <= versions.newest[stage, minibatch]
        if isinstance(schedule, SchedulePipeDream):
            assert version == schedule.version_used(stage, minibatch, n_workers)
        else:
            assert version == 0
    if table.weights is Weights.DOUBLE_BUFFERED:
        assert max(versions.held) <= 2
