"""Costs and reports out of timelines: those of a prediction give its own costs again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from torchweft.pipeline.schedules import (
    Action,
    Costs,
    Kind,
    Schedule1F1B,
    ScheduleNaive,
    ScheduleZBVZeroBubble,
    Span,
    Table,
    Timeline,
    predict,
)
from torchweft.pipeline.schedules.timeline import measured_costs, report

TABLES = [ScheduleNaive(3).table(3), Schedule1F1B(6).table(3), ScheduleZBVZeroBubble(6).table(3)]


@settings(max_examples=share(100))
@given(st.sampled_from(TABLES), st.data())
def test_the_costs_of_a_prediction_are_found_again(table: Table, data: st.DataObject) -> None:
    lengths = st.integers(1, 50)
    durations = {
        (stage, kind): data.draw(lengths) for stage in range(table.n_stages) for kind in Kind
    }
    costs = Costs(durations, data.draw(st.sampled_from([0, 1, 7])))
    timeline = predict(table, costs)
    found = measured_costs([timeline, timeline])
    used = {(action.stage, action.kind) for row in table.rows for action in row}
    assert found.duration_s == {key: durations[key] for key in used}
    # The first forward of the second worker always waits for a message.
    assert found.latency_s == costs.latency_s
    assert predict(table, found).spans == timeline.spans


def test_a_value_that_comes_before_its_maker_is_done_takes_no_time() -> None:
    table = Table.from_csv("0F0,0B0\n1F0,1B0\n")
    zero, one = [
        [Action(stage, kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)] for stage in (0, 1)
    ]
    rows = (
        (Span(zero[0], 0, 10), Span(zero[1], 29, 40)),
        (Span(one[0], 9, 20), Span(one[1], 20, 30)),
    )
    assert measured_costs([Timeline(table, rows)]).latency_s == 0


def test_the_idle_share_is_the_mean_of_the_workers() -> None:
    timeline = predict(TABLES[1], Costs.uniform(3, forward_s=2))
    assert timeline.idle_share == pytest.approx(sum(timeline.idle_shares) / 3)
    busy = sum(end - start for row in timeline.spans for _, start, end in row)
    assert timeline.idle_share == pytest.approx(1 - busy / (3 * timeline.makespan_s))


def test_a_report_has_a_line_for_each_worker() -> None:
    table = TABLES[1]
    slow = predict(table, Costs.uniform(3, latency_s=1))
    fast = predict(table, Costs.uniform(3))
    names = ["a", "worker-of-a-long-name", "c"]
    lines = report([slow, slow], fast, names, (3, 2, 9)).splitlines()
    assert lines[0] == "Schedule1F1B, 2 steps measured"
    assert [line.split()[0] for line in lines[3:]] == [*names, "all", "step"]
    assert lines[5].split()[1:] == [
        f"{100 * slow.idle_shares[2]:.1f}",
        "%",
        f"{100 * fast.idle_shares[2]:.1f}",
        "%",
        "9",
        "1",
    ]
    assert lines[-1].split()[1:] == [f"{slow.makespan_s:.2f}", "s", "24.00", "s"]
    # Numbers stand under their headings.
    ends = [line.index(" %") for line in lines[3:7]]
    assert all(before == after for before, after in pairwise(ends))
