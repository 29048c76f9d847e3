"""Tests timelines, predicted and measured, their pictures and trace events."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

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
    Action,
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
    Span,
    Table,
    TableError,
    Timeline,
    predict,
)
from torchweft.pipeline.schedules.table import chain
from torchweft.pipeline.schedules.timeline import measured_costs, report


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
@given(st.one_of(schedules(4), replicated()), st.data())
def test_times_are_those_of_another_model(drawn: Any, data: st.DataObject) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    costs = data.draw(whole_costs(table))
    expected = rerun(table.rows, chain(table.n_stages), costs)
    found = [[(start, end) for _, start, end in row] for row in predict(table, costs).spans]
    assert found == expected


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


# Costs and reports out of timelines: those of a prediction give its own costs again.


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


SVG = "{http://www.w3.org/2000/svg}"


def drawn(table: Table, costs: Costs | None = None) -> ElementTree.Element:
    costs = Costs.uniform(table.n_stages) if costs is None else costs
    return ElementTree.fromstring(predict(table, costs).svg())


def texts(picture: ElementTree.Element, name: str) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text") if text.get("class") == name]


def boxes(picture: ElementTree.Element) -> dict[float, list[tuple[float, float]]]:
    """Returns the left and right end of each action's box, by row."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in picture.iter(f"{SVG}rect"):
        if box.get("class") == "box":
            x, y, width = (float(box.attrib[name]) for name in ("x", "y", "width"))
            rows.setdefault(y, []).append((x, x + width))
    return rows


DRAWN = [
    Schedule1F1B(8).table(4),
    ScheduleZBVZeroBubble(8).table(4),
    Schedule1F1B(32).table(8),
    ScheduleZBVZeroBubble(32).table(8),
    ScheduleInterleaved1F1B(8, 3).table(4),
]


@pytest.mark.parametrize("table", DRAWN, ids=lambda table: f"{table.name}-{table.n_workers}")
def test_every_action_has_a_box_and_a_label_that_fit(table: Table) -> None:
    picture = drawn(table)
    rows = boxes(picture)
    assert [len(row) for row in rows.values()] == [len(row) for row in table.rows]
    assert len(texts(picture, "label")) == sum(map(len, table.rows))
    _, _, width, _ = map(float, picture.attrib["viewBox"].split())
    for row in rows.values():
        assert all(after[0] >= before[1] - 0.11 for before, after in pairwise(row))
        assert all(right - left >= 6 * 2 for left, right in row)
        assert max(right for _, right in row) < width < 4100


def test_the_title_has_the_idle_share_and_the_axis_the_time() -> None:
    picture = drawn(DRAWN[0])
    title = "Schedule1F1B: 4 workers, 4 stages, 8 micro-batches, 27.3 % idle"
    assert texts(picture, "title") == [title]
    assert texts(picture, "tick") == ["0", "5", "10", "15", "20", "25", "30"]
    assert texts(picture, "name") == ["worker 0", "worker 1", "worker 2", "worker 3", "time"]
    assert texts(picture, "note") == ["forward", "backward"]


def test_timelines_are_drawn_below_each_other_on_one_axis() -> None:
    table = DRAWN[0]
    slow = replace(predict(table, Costs.uniform(4, forward_s=2)), is_measured=True)
    fast = predict(table, Costs.uniform(4))
    both, alone = ElementTree.fromstring(slow.svg(fast)), ElementTree.fromstring(slow.svg())
    assert texts(both, "title") == [slow.title, fast.title]
    assert texts(both, "name") == [f"worker {n}" for n in (0, 1, 2, 3)] * 2 + ["time"]
    assert texts(alone, "name")[-1] == "time, s"
    rows = list(boxes(both).values())
    assert len(rows) == 8
    scales = [max(end for row in half for _, end in row) - 78 for half in (rows[:4], rows[4:])]
    assert scales[0] / scales[1] == pytest.approx(slow.makespan_s / fast.makespan_s, rel=0.01)
    _, _, _, height = map(float, both.attrib["viewBox"].split())
    assert max(boxes(both)) + 26 < height


def test_a_name_is_no_markup() -> None:
    table = Schedule1F1B(1).table(1)
    named = Table("<b>&", table.n_stages, table.n_microbatches, table.rows)
    assert texts(drawn(named), "title")[0].startswith("<b>&: 1 workers")
    free = Costs.uniform(1, forward_s=0, input_s=0, weight_s=0)
    assert texts(drawn(named, free), "tick") == ["0"]


# The trace events follow the rules of the Trace Event Format that Perfetto relies on.


TRACED = [
    Schedule1F1B(8).table(4),
    ScheduleInterleaved1F1B(4, 2).table(2),
    ScheduleZBVZeroBubble(8).table(4),
    SchedulePipeDream(6, replicas=(2, 1)).table(3),
]
REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
each_table = pytest.mark.parametrize("table", TRACED, ids=lambda table: table.name)


def events_of(
    table: Table, unit_s: float = 1 / 3, edges: list[tuple[int, int]] | None = None
) -> dict[str, list[dict[str, Any]]]:
    costs = Costs.uniform(
        table.n_stages,
        forward_s=unit_s,
        input_s=unit_s,
        weight_s=unit_s / 7,
        update_s=unit_s / 9,
    )
    document = json.loads(predict(table, costs, edges).trace())
    assert document["displayTimeUnit"] in ("ms", "ns")
    found: dict[str, list[dict[str, Any]]] = {phase: [] for phase in REQUIRED}
    for event in document["traceEvents"]:
        found[event["ph"]].append(event)
    return found


@each_table
def test_the_slices_of_a_track_are_its_row_and_do_not_overlap(table: Table) -> None:
    slices = events_of(table, 1e-7 / 3)["X"]
    for worker, row in enumerate(table.rows):
        track = [event for event in slices if event["tid"] == worker + 1]
        assert [event["name"] for event in track] == list(map(str, row))
        for action, event in zip(row, track, strict=True):
            args = event["args"]
            assert (args["stage"], args["microbatch"]) == (action.stage, action.microbatch)
            assert args["kind"] == event["cat"]
        for before, after in pairwise(track):
            end_ns = round(1000 * before["ts"]) + round(1000 * before["dur"])
            assert end_ns <= round(1000 * after["ts"])


@each_table
def test_arrows_lead_from_a_slice_to_one_of_another_worker(table: Table) -> None:
    events = events_of(table)
    starts = {event["id"]: event for event in events["s"]}
    ends = {event["id"]: event for event in events["f"]}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(events["s"]) == len(events["f"]) > 0
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        sender, taker = slice_at(events["X"], start), slice_at(events["X"], end)
        wanted = "activation" if sender["cat"] == "forward" else "gradient"
        assert start["name"] == wanted
        assert sender["args"]["microbatch"] <= taker["args"]["microbatch"]


def slice_at(slices: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
    """Returns the slice that encloses an event; there is only one."""
    found = [
        each
        for each in slices
        if each["tid"] == event["tid"] and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
    ]
    assert len(found) == 1, event
    return found[0]
