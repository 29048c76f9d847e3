"""Reads the file of a trace by the rules of Perfetto's importer, and checks that it keeps to them.

The importer drops or misplaces what breaks these rules, without an error: slices of a track that
overlap without being inside one another, asynchronous slices without an end, flows that do not
begin or end, and tracks without a name.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class Found(NamedTuple):
    """What a trace holds.

    Attributes:
        about: What Weft says about it.
        slices: All slices: those of threads, and asynchronous ones.
        flows: For each arrow the slices that it leads through, in order.
        tracks: Names of threads by process and number.
        processes: Names of processes by number.
        counters: Events of counters.
    """

    about: dict[str, Any]
    slices: list[Event]
    flows: dict[int, list[Event]]
    tracks: dict[tuple[int, int], str]
    processes: dict[int, str]
    counters: list[Event]

    def of(self, category: str) -> list[Event]:
        return [each for each in self.slices if each["cat"] == category]

    def worker_of(self, event: Event) -> str:
        return self.processes[event["pid"]].split(" on ")[0]


def read_trace(path: Path) -> Found:
    """Reads a file; an assertion fails if it breaks a rule."""
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    slices, counters = [], []
    begun: dict[Any, Event] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M" if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            case "M" if event["name"] == "thread_name":
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
            case "M":
                assert event["name"] in ("process_labels", "process_sort_index")
            case "X":
                assert event["dur"] >= 0
                slices.append(event)
            case "b":
                key = event["pid"], event["cat"], event["id"]
                assert key not in begun, "two asynchronous slices with one id"
                begun[key] = event
            case "e":
                first = begun.pop((event["pid"], event["cat"], event["id"]))
                assert event["ts"] >= first["ts"]
                slices.append({**first, "dur": event["ts"] - first["ts"]})
            case "C":
                assert event["args"]["bytes"] >= 0
                counters.append(event)
            case other:
                raise AssertionError(f"an event of phase {other!r}")
    assert not begun, "asynchronous slices without an end"
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    on_threads = [each for each in slices if each["ph"] == "X"]
    check_nesting(on_threads)
    for each in on_threads:
        assert (each["pid"], each["tid"]) in tracks
    for each in slices + counters:
        assert each["pid"] in processes
    flows = flows_of(on_threads)
    return Found(content["weft"], slices, flows, tracks, processes, counters)


def check_nesting(slices: list[Event]) -> None:
    """Checks that each slice ends before the one around it does."""
    by_track: dict[Any, list[Event]] = defaultdict(list)
    for each in slices:
        by_track[each["pid"], each["tid"]].append(each)
    for track in by_track.values():
        around: list[float] = []
        for each in track:  # They are in order: the outer one first.
            end = round(each["ts"] + each["dur"], 3)
            while around and around[-1] <= each["ts"]:
                around.pop()
            assert not around or end <= around[-1] + 1e-3, each
            around.append(end)


def flows_of(slices: list[Event]) -> dict[int, list[Event]]:
    """Returns the arrows; checks that each begins once and ends once."""
    ends: dict[int, list[Event]] = defaultdict(list)
    for each in slices:
        if "bind_id" in each:
            assert each["flow_out"] or each["flow_in"]
            ends[each["bind_id"]].append(each)
    flows = {}
    for number, found in ends.items():
        begins = [each for each in found if not each["flow_in"]]
        steps = [each for each in found if each["flow_in"] and each["flow_out"]]
        finishes = [each for each in found if not each["flow_out"]]
        assert len(begins) == len(finishes) == 1, found
        assert len(steps) <= 1, found
        flows[number] = [*begins, *steps, *finishes]
    return flows
