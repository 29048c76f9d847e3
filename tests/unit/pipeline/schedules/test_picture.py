"""Tests pictures of timelines, and their trace events."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from torchweft.pipeline.schedules import (
    Costs,
    Kind,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    Table,
    predict,
)

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


TABLES = [
    Schedule1F1B(8).table(4),
    ScheduleZBVZeroBubble(8).table(4),
    Schedule1F1B(32).table(8),
    ScheduleZBVZeroBubble(32).table(8),
    ScheduleInterleaved1F1B(8, 3).table(4),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name}-{table.n_workers}")
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
    picture = drawn(TABLES[0])
    title = "Schedule1F1B: 4 workers, 4 stages, 8 micro-batches, 27.3 % idle"
    assert texts(picture, "title") == [title]
    assert texts(picture, "tick") == ["0", "5", "10", "15", "20", "25", "30"]
    assert texts(picture, "name") == ["worker 0", "worker 1", "worker 2", "worker 3", "time"]
    assert texts(picture, "note") == ["forward", "backward"]


def test_each_box_tells_its_action_and_time() -> None:
    tips = [tip.text for group in drawn(TABLES[0]).iter(f"{SVG}g") for tip in group[:1]]
    assert tips[:3] == ["0F0: 0 to 1", "0F1: 1 to 2", "0F2: 2 to 3"]
    assert "3B7: 25 to 27" in tips


def test_colours_tell_kinds_stages_and_neighbouring_microbatches_apart() -> None:
    colours: dict[str, str] = {}
    for group in drawn(TABLES[1]).iter(f"{SVG}g"):
        tip, box, _ = group
        colours[(tip.text or "").split(":")[0]] = box.attrib["fill"]
    assert len(colours) == 8 * 8 * 3
    first = [colours[name] for name in ("0F0", "0F1", "7F0", "0I0", "0W0", "7I0", "7W0")]
    assert len(set(first)) == len(first)
    assert colours["0F3"] == colours["1F3"]


def test_updates_are_shown_with_or_without_a_duration() -> None:
    table = SchedulePipeDream(5).table(2)
    for costs in (Costs.uniform(2), Costs.uniform(2, update_s=0.01)):
        picture = drawn(table, costs)
        assert [len(row) for row in boxes(picture).values()] == [15, 15]
        assert float(picture.attrib["width"]) < 1000
    assert "5 minibatches" in texts(picture, "title")[0]


def test_very_different_durations_make_no_endless_picture() -> None:
    lengths = {(stage, kind): 1.0 for stage in range(2) for kind in Kind}
    table = Schedule1F1B(4).table(2)
    picture = drawn(table, Costs(lengths | {(0, Kind.FORWARD): 1e-6}))
    assert float(picture.attrib["width"]) < 4100
    assert len(texts(picture, "label")) < sum(map(len, table.rows))


def test_a_name_is_no_markup() -> None:
    table = Schedule1F1B(1).table(1)
    named = Table("<b>&", table.n_stages, table.n_microbatches, table.rows)
    assert texts(drawn(named), "title")[0].startswith("<b>&: 1 workers")
    free = Costs.uniform(1, forward_s=0, input_s=0, weight_s=0)
    assert texts(drawn(named, free), "tick") == ["0"]


def test_timelines_are_drawn_below_each_other_on_one_axis() -> None:
    table = TABLES[0]
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


def test_an_action_that_is_short_by_chance_does_not_widen_the_picture() -> None:
    table = Schedule1F1B(32).table(4)
    costs = {(stage, kind): 1.0 for stage in range(4) for kind in Kind}
    usual = drawn(table, Costs(costs))
    odd = drawn(table, Costs(costs | {(3, Kind.FORWARD): 0.001}))
    widths = [float(picture.attrib["width"]) for picture in (usual, odd)]
    assert widths[1] <= 4 * widths[0]


# The trace events follow the rules of the Trace Event Format that Perfetto relies on.


TABLES_TRACING = [
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
each_table = pytest.mark.parametrize("table", TABLES_TRACING, ids=lambda table: table.name)


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
def test_each_event_has_the_fields_of_its_phase(table: Table) -> None:
    for phase, events in events_of(table).items():
        for event in events:
            assert event.keys() == REQUIRED[phase] | {"ph"}
            assert all(isinstance(event[name], int) and event[name] > 0 for name in ("pid", "tid"))
            assert all(event[name] >= 0 for name in ("ts", "dur") if name in event)


@each_table
def test_each_worker_is_a_track_with_a_name(table: Table) -> None:
    named = [event for event in events_of(table)["M"] if event["name"] == "thread_name"]
    tracks = {event["tid"]: event["args"]["name"] for event in named}
    assert tracks == {n + 1: f"worker {n}" for n in range(table.n_workers)}


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


def test_arrows_of_a_chain_are_two_for_each_micro_batch_and_border() -> None:
    assert len(events_of(TABLES_TRACING[0])["s"]) == 2 * 8 * 3


def test_arrows_follow_skip_connections() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    events = events_of(TABLES_TRACING[0], edges=edges)
    assert len(events["s"]) == 2 * 8 * 4


def test_an_action_without_a_duration_has_no_arrows() -> None:
    table = TABLES_TRACING[3]
    document = json.loads(predict(table, Costs.uniform(table.n_stages)).trace())
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    arrows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    assert any(event["dur"] == 0 for event in slices)
    assert arrows
    for event in arrows:
        assert slice_at(slices, event)["cat"] != "update"
