from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from tests.unit.pipeline.schedules.all_schedules import AnySchedule, replicated, schedules
from torchweft.pipeline.schedules import (
    Kind,
    Schedule1F1B,
    SchedulePipeDream,
    Table,
    Versions,
    Weights,
    versions_of,
)


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


@pytest.mark.parametrize(
    ("weights", "held"),
    [("stashing", (4, 3, 2, 1)), ("vertical-sync", (4, 4, 4, 4)), ("2bw", (2, 2, 2, 2))],
)
def test_versions_held_on_4_workers(weights: str, held: tuple[int, ...]) -> None:
    assert versions_of(SchedulePipeDream(40, weights).table(4)).held == held


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


def test_a_synchronous_table_has_one_version() -> None:
    assert versions_of(Schedule1F1B(8).table(4)).held == (1, 1, 1, 1)
