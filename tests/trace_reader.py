"""Reads the file of a trace by the rules of Perfetto's importer, and checks that it keeps to them.

The importer drops or misplaces what breaks these rules, without an error that a user would see:

- Numbers are finite, and keys are there once. Processes and threads are numbers of 32 bits; 0 is no
  thread of a program.
- Times are microseconds. The importer makes whole nanoseconds of them, by cutting off the rest.
- Slices of a track are inside one another or apart, to the nanosecond. One that encloses others
  stands before them.
- An asynchronous slice has a begin and an end, by category and id: these are known to all processes
  together.
- An arrow binds to the slices that have its number. It begins once, ends once, and goes through at
  most one more slice. In the order of time, and of the file, it begins first and ends last.
- Each process and each track has one name, and no name is for a track that has nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]

UINT32 = 1 << 32
PHASES = {
    "M": {"name", "ph", "pid", "tid", "ts", "args"},
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "b": {"name", "cat", "ph", "pid", "tid", "ts", "id", "args"},
    "e": {"name", "cat", "ph", "pid", "tid", "ts", "id"},
}
"""The fields of an event, by its phase."""
FLOW = {"bind_id", "flow_in", "flow_out"}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
}
"""The argument of each kind of metadata, and its type."""


class Found(NamedTuple):
    """What a trace holds.

    Attributes:
        about: What Weft says about it.
        slices: All slices: those of threads, and asynchronous ones.
        flows: For each arrow the slices that it leads through, in order.
        tracks: Names of threads by process and number.
        processes: Names of processes by number.
    """

    about: dict[str, Any]
    slices: list[Event]
    flows: dict[int, list[Event]]
    tracks: dict[tuple[int, int], str]
    processes: dict[int, str]

    def of(self, category: str) -> list[Event]:
        return [each for each in self.slices if each["cat"] == category]

    def worker_of(self, event: Event) -> str:
        return self.processes[event["pid"]].split(" on ")[0]


def read_trace(path: Path) -> Found:
    """Reads a file; an assertion fails if it breaks a rule."""
    content = json.loads(path.read_text(), object_pairs_hook=_once, parse_constant=_no_constant)
    assert content["displayTimeUnit"] in ("ms", "ns")
    return read_events(content["traceEvents"], content["weft"])


def read_events(events: list[Event], about: dict[str, Any]) -> Found:
    """Reads the events of a file; an assertion fails if they break a rule."""
    for event in events:
        check_fields(event)
    check_order(events)
    processes, tracks = names_in(events)
    on_threads = [each for each in events if each["ph"] == "X"]
    check_nesting(on_threads)
    slices = on_threads + asynchronous_in(events)
    slices.sort(key=lambda each: each["ts"])
    used = {(each["pid"], each["tid"]) for each in slices}
    assert used == tracks.keys(), used ^ tracks.keys()
    assert {each["pid"] for each in slices} <= processes.keys()
    return Found(about, slices, flows_of(on_threads), tracks, processes)


def ns(microseconds: float) -> int:
    """Returns the nanoseconds that the importer makes of a time."""
    return int(microseconds * 1000.0)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key is there twice: {[key for key, _ in pairs]}"
    return found


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def check_fields(event: Event) -> None:
    fields = PHASES[event["ph"]]
    assert fields <= event.keys() <= fields | (FLOW if event["ph"] == "X" else set()), event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    for name, least in (("pid", 1), ("tid", 1 if event["ph"] in "Xbe" else 0)):
        assert type(event[name]) is int, event
        assert least <= event[name] < UINT32, event
    for name in ("ts", "dur"):
        assert type(event.get(name, 0)) in (int, float), event
        assert event.get(name, 0) >= 0, event
    assert isinstance(event.get("args", {}), dict), event
    if event["ph"] in "Xbe":
        assert isinstance(event["cat"], str), event
        assert event["cat"], event
    if event["ph"] in "be":
        assert int(event["id"], 16) >= 0, event


def check_order(events: Iterable[Event]) -> None:
    """Checks that events are in the order of time; the importer keeps that of equal times."""
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def names_in(events: Iterable[Event]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """Returns the names of processes and tracks; checks that each has one."""
    seen: set[Any] = set()
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] != "M":
            continue
        argument, kind = METADATA[event["name"]]
        assert event["args"].keys() == {argument}, event
        value = event["args"][argument]
        assert type(value) is kind, event
        place = event["pid"], event["tid"]
        assert (event["name"], place) not in seen, f"said twice: {event}"
        seen.add((event["name"], place))
        if event["name"] == "thread_name":
            assert value, event
            tracks[place] = value
        else:
            assert event["tid"] == 0, event
        if event["name"] == "process_name":
            processes[event["pid"]] = value
    assert len({*processes.values()}) == len(processes), "two processes have one name"
    return processes, tracks


def asynchronous_in(events: Iterable[Event]) -> list[Event]:
    """Returns the asynchronous slices; checks that each begins and ends once."""
    begun: dict[Any, Event] = {}
    ended: set[Any] = set()
    slices = []
    for event in events:
        if event["ph"] not in "be":
            continue
        key = event["cat"], event["id"]  # Of all processes together.
        if event["ph"] == "b":
            assert key not in begun, f"two asynchronous slices have one id: {event}"
            assert key not in ended, f"two asynchronous slices have one id: {event}"
            begun[key] = event
        else:
            first = begun.pop(key)
            ended.add(key)
            same = ("name", "pid", "tid")
            assert [event[each] for each in same] == [first[each] for each in same], event
            slices.append({**first, "dur": event["ts"] - first["ts"]})
    assert not begun, "asynchronous slices without an end"
    return slices


def check_nesting(slices: list[Event]) -> None:
    """Checks that each slice is inside of that around it, to the nanosecond."""
    by_track: dict[Any, list[Event]] = defaultdict(list)
    for each in slices:
        by_track[each["pid"], each["tid"]].append(each)
    for track in by_track.values():
        around: list[int] = []
        for each in track:  # They are in order: the outer one first.
            begin = ns(each["ts"])
            end = begin + ns(each["dur"])
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], f"not inside of that around it: {each}"
            around.append(end)


def flows_of(slices: list[Event]) -> dict[int, list[Event]]:
    """Returns the arrows; checks that each begins once, ends once, and leads forwards."""
    through: dict[int, list[Event]] = defaultdict(list)
    for each in slices:  # In order.
        if each.keys() & FLOW:
            assert each.keys() >= FLOW, each
            assert type(each["bind_id"]) is int, each
            assert each["bind_id"] > 0, each
            assert each["flow_out"] or each["flow_in"], each
            through[each["bind_id"]].append(each)
    for found in through.values():
        ways = [(each["flow_in"], each["flow_out"]) for each in found]
        begin, step, end = (False, True), (True, True), (True, False)
        assert ways in ([begin, end], [begin, step, end]), found
        times = [each["ts"] for each in found]
        assert times == sorted(times), found
    return dict(through)
