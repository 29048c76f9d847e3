"""The trace events follow the rules of the Trace Event Format that Perfetto relies on."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from torchweft.pipeline.schedules import (
    Costs,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    Table,
    predict,
)

TABLES = [
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
each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


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
    assert len(events_of(TABLES[0])["s"]) == 2 * 8 * 3


def test_arrows_follow_skip_connections() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    events = events_of(TABLES[0], edges=edges)
    assert len(events["s"]) == 2 * 8 * 4


def test_an_action_without_a_duration_has_no_arrows() -> None:
    table = TABLES[3]
    document = json.loads(predict(table, Costs.uniform(table.n_stages)).trace())
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    arrows = [event for event in document["traceEvents"] if event["ph"] in "sf"]
    assert any(event["dur"] == 0 for event in slices)
    assert arrows
    for event in arrows:
        assert slice_at(slices, event)["cat"] != "update"
