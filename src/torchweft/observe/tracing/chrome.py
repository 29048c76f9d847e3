"""Writes a trace in the Trace Event Format, which Perfetto opens.

A worker is a process of the trace, and a thread is a track. The slices of a track nest. Work that
does not nest in its thread is on tracks of its own: calls with a future, coroutines, calls that
wait in line. An arrow is a flow, whose number the slices at its ends have in common. Times are
microseconds since the begin of the trace, or since the earliest slice where that began before: a
worker records as soon as it is asked to, while others are still being asked.

Clocks of two workers are compared by calls that read the other one, at an unknown moment of the
call. So its lead over the own clock lies in an interval as long as the call; the middle is wrong by
at most half of its length, and the shortest of several calls counts. Two such measurements, before
and after a trace, give the lead for all times in between, where both clocks run at constant rates
meanwhile. The error there is at most the larger one of both.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from torchweft.observe.tracing.reading import FORMAT, RECEIVE, RUN, SEND
from torchweft.observe.tracing.slices import Slice
from torchweft.reports import Lead

Event = dict[str, Any]

_NS = 1e9
_STAGES = {"call": 0, "create": 0, SEND: 0, RECEIVE: 1, RUN: 2}
"""The categories of slices at arrows, in the order in which an arrow leads through them."""


class Alignment(NamedTuple):
    """Converts times of another worker's clock to the own one.

    Attributes:
        first: The lead before the times to convert.
        last: The lead after them.
    """

    first: Lead
    last: Lead

    @property
    def error_s(self) -> float:
        """By how much a converted time may be wrong, between both measurements."""
        return max(self.first.error_s, self.last.error_s)

    def own(self, their_s: float) -> float:
        """Returns the own time at which the other clock showed a time."""
        begin_s = self.first.at_s + self.first.ahead_s
        duration_s = self.last.at_s + self.last.ahead_s - begin_s
        if duration_s <= 0:
            return their_s - self.first.ahead_s
        share = (their_s - begin_s) / duration_s
        return self.first.at_s + share * (self.last.at_s - self.first.at_s)


SAME = Alignment(Lead(0.0, 0.0, 0.0), Lead(0.0, 0.0, 0.0))
"""The alignment of workers that read one clock."""


class Traced(NamedTuple):
    """What one worker has recorded.

    Attributes:
        about: What it says of the recording; see ``Recorder.end``.
        slices: Its slices, at its own time.
        alignment: Converts its times.
    """

    about: dict[str, Any]
    slices: list[Slice]
    alignment: Alignment


def write(
    file: IO[str], traced: Sequence[Traced], about: Mapping[str, Any], began_s: float
) -> None:
    """Writes a trace.

    Args:
        file: Takes the text.
        traced: What the workers have recorded, by rank.
        about: What is said about the trace as a whole; plain values.
        began_s: The begin of the trace.
    """
    file.write('{"displayTimeUnit": "ms", "weft": ')
    json.dump({"format": FORMAT, **about}, file)
    file.write(', "traceEvents": [\n')
    separator = ""
    for event in events(traced, began_s):
        file.write(separator)
        json.dump(event, file, separators=(",", ":"))
        separator = ",\n"
    file.write("\n]}\n")


def events(traced: Sequence[Traced], began_s: float) -> Iterator[Event]:
    """Yields the events of a trace: descriptions of tracks first, then by time."""
    made: list[tuple[int, Slice]] = []
    for pid, worker in enumerate(traced, 1):
        yield from _described(worker.about, pid)
        own = worker.alignment.own
        made += [
            (pid, each._replace(began_s=own(each.began_s), ended_s=own(each.ended_s)))
            for each in worker.slices
        ]
    began_s = min([began_s, *[each.began_s for _, each in made]])
    arrows = arrows_of([each for _, each in made])
    timed: list[Event] = []
    for place, (pid, each) in enumerate(made):
        timed += _events_of(place, each, pid, arrows.get(place), began_s)
    # A slice comes before those inside of it.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    yield from timed


def arrows_of(slices: Sequence[Slice]) -> dict[int, Event]:
    """Returns what the events at arrows say of them, by the places of the slices.

    Of slices with one name, the first that was sent is the first that was read. One that was sent
    before the trace is not there. A later one is not taken for it if that has another size.
    """
    chains: list[list[int]] = []
    sent: dict[str, deque[list[int]]] = defaultdict(deque)
    arrived: dict[str, list[int]] = {}
    places = [place for place, each in enumerate(slices) if each.arrow]
    places.sort(key=lambda place: (_STAGES[slices[place].category], slices[place].began_s))
    for place in places:
        each = slices[place]
        waiting = sent[each.arrow]
        if each.category == RECEIVE:
            fits = waiting and slices[waiting[0][0]].args["bytes"] == each.args["bytes"]
            chain = waiting.popleft() if fits else []
            arrived[each.arrow] = chain
        elif each.category == RUN:
            chain = arrived.get(each.arrow) or (waiting[0] if waiting else [])
        else:
            chain = []
            waiting.append(chain)
        if not chain:
            chains.append(chain)
        chain.append(place)
    return {
        place: {"bind_id": number, "flow_out": place != chain[-1], "flow_in": place != chain[0]}
        for number, chain in enumerate(chains, 1)
        if len(chain) > 1
        for place in chain
    }


def _events_of(
    place: int, one: Slice, pid: int, arrow: Event | None, began_s: float
) -> Iterator[Event]:
    began_ns = _ns(one.began_s - began_s)
    began_us = _us(began_ns)
    event = {"name": one.name, "cat": one.category, "pid": pid, "tid": one.track, "ts": began_us}
    taken_ns = max(_ns(one.ended_s - began_s) - began_ns, 0)
    if not one.is_apart:
        yield event | {"ph": "X", "dur": _us(taken_ns), "args": one.args} | (arrow or {})
        return
    identity = f"0x{place:x}"
    yield event | {"ph": "b", "id": identity, "args": one.args}
    yield event | {"ph": "e", "id": identity, "ts": _us(began_ns + taken_ns)}
    if arrow is not None:
        # An arrow cannot end or begin at such a track: it does at a mark in the thread.
        args = {"call": one.args.get("call")}
        yield event | {"ph": "X", "dur": 0, "cat": "mark", "args": args} | arrow


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _us(nanoseconds: int) -> float:
    """Returns microseconds that are so many nanoseconds when a thousand of them are cut off.

    Perfetto cuts them off. The nearest number is sometimes below, and a slice could then end a
    nanosecond after that around it.
    """
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _described(about: Mapping[str, Any], pid: int) -> Iterator[Event]:
    def described(name: str, args: Event, tid: int = 0) -> Event:
        return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}

    title = f"{about['name']} on {about['host']}" if about["host"] else about["name"]
    yield described("process_name", {"name": title})
    yield described("process_labels", {"labels": f"process {about['pid']}"})
    yield described("process_sort_index", {"sort_index": pid})
    for tid, name in about["tracks"].items():
        yield described("thread_name", {"name": name}, tid)
