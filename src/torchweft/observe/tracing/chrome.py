"""Writes a trace in the Trace Event Format, which Perfetto opens.

A worker is a process of the trace, and a thread is a track. The slices of a track nest. Work that
does not nest in its thread is on tracks of its own: calls with a future, coroutines, calls that
wait in line. An arrow is a flow, whose number the slices at its ends have in common. Times are
microseconds since the begin of the trace, or since the earliest record where that began before: a
worker records as soon as it is asked to, while others are still being asked.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from torchweft.engine.wire.messages import Kind
from torchweft.observe.tracing.joining import Call, Joined, Message
from torchweft.observe.tracing.reading import FORMAT, ON_CONNECTION, PROFILED, RECEIVE, SEND
from torchweft.observe.tracing.records import FETCH, Pulled, Ran, Thread, WorkerTrace

Event = dict[str, Any]
Track = int | tuple[str, int]

_US = 1e6
_NS = 1e9
_QUEUED_S = 20e-6
"""Shorter times in line are no slices, only arguments."""
_UNKNOWN = 1 << 30
"""Threads whose id at the system is unknown, and devices, are numbered from here on: beyond all ids
of Linux, and within the 32 bits that importers have."""


@dataclass(slots=True)
class Slice:
    """Something that takes time.

    Attributes:
        worker: The id of the worker.
        track: The number of its thread there, or what was profiled: device, and thread or stream.
        began_s: When it began.
        ended_s: When it ended.
        category: Its category.
        name: Its name.
        args: What is known about it.
        flow: The number of the arrow that begins, goes through or ends here; 0 for none.
        is_out: Whether that arrow goes on from here.
        is_in: Whether it comes from elsewhere.
        is_apart: Whether it is on a track of its own.
    """

    worker: int
    track: Track
    began_s: float
    ended_s: float
    category: str
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    flow: int = 0
    is_out: bool = False
    is_in: bool = False
    is_apart: bool = False


def write(file: IO[str], joined: Joined, about: Mapping[str, Any], began_s: float) -> None:
    """Writes a trace.

    Args:
        file: Takes the text.
        joined: The records.
        about: What is said about the trace as a whole; plain values.
        began_s: The begin of the trace.
    """
    file.write('{"displayTimeUnit": "ms", "weft": ')
    json.dump({"format": FORMAT, **about}, file)
    file.write(', "traceEvents": [\n')
    separator = ""
    for event in events(joined, began_s):
        file.write(separator)
        json.dump(event, file, separators=(",", ":"))
        separator = ",\n"
    file.write("\n]}\n")


def events(joined: Joined, began_s: float) -> Iterator[Event]:
    """Yields the events of a trace: descriptions of tracks first, then by time."""
    numbers = {worker: place + 1 for place, worker in enumerate(_in_order(joined))}
    tracks = {worker: _Tracks(joined.workers[worker]) for worker in numbers}
    made = list(_slices(joined))
    began_s = min([began_s, *[each.began_s for each in made]])
    _set_apart(made)
    timed: list[Event] = []
    for place, each in enumerate(made):
        timed += _events_of(place, each, numbers[each.worker], tracks[each.worker], began_s)
    timed += _in_flight(joined, numbers, began_s)
    # A slice comes before those inside of it.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    for worker, number in numbers.items():
        yield from _described(joined.workers[worker], number, tracks[worker])
    yield from timed


def _in_order(joined: Joined) -> list[int]:
    return sorted(joined.workers, key=lambda worker: joined.workers[worker].rank)


# Slices


def _slices(joined: Joined) -> Iterator[Slice]:
    flows = itertools.count(1)
    flow_of: dict[int, int] = {id(message): next(flows) for message in joined.messages}
    for call in joined.calls:
        yield from _slices_of_call(joined, call, flow_of, flows)
    call_of = {id(each): call for call in joined.calls for each in (call.request, call.answer)}
    for message in joined.messages:
        yield from _slices_of_message(joined, message, flow_of[id(message)], call_of)
    for worker in joined.workers.values():
        yield from _slices_of_work(worker)


def _slices_of_call(
    joined: Joined, call: Call, flow_of: Mapping[int, int], flows: Iterator[int]
) -> Iterator[Slice]:
    request = call.request
    flow = flow_of[id(request)] if request is not None else 0
    args: dict[str, Any] = {"call": call.key, "function": call.function}
    if call.context_id > 0:
        args["context"] = call.context_id
    made, created, served = call.made, call.created, call.served
    callee = joined.name_of(call.callee)
    starts_arrow = request is None and served is not None and call.caller in joined.workers
    if made is not None:
        told = {**args, "to": callee, **_bytes_of(request, "sent"), **_bytes_of(call.answer, "got")}
        if made.failed:
            told["failed"] = True
        if made.parent_caller >= 0 and made.parent_number:
            told["parent"] = f"{made.parent_caller}.{made.parent_number}"
        name = f"call {call.function}"
        span = (made.started_s, made.ended_s)
        one = Slice(call.caller, made.thread, *span, "call", name, told, is_apart=made.is_async)
        if starts_arrow:
            one.flow = flow = next(flows)
            one.is_out = True
        yield one
    elif created is not None:
        began_s = created.at_s
        if request is not None and request.sent is not None:
            began_s = min(request.sent.began_s, began_s)
        elif starts_arrow and served is not None:
            # A worker may serve its own call before the thread that has made it goes on.
            began_s = min(served.arrived_s, began_s)
        told = {**args, "to": callee, **_bytes_of(request, "sent")}
        name, thread = f"create {call.function}", created.thread
        one = Slice(call.caller, thread, began_s, created.at_s, "create", name, told)
        if starts_arrow:
            one.flow = flow = next(flows)
            one.is_out = True
        yield one
    if served is None:
        return
    name = served.function
    told = {**args, "function": name, "from": joined.name_of(call.caller)}
    queued_s = served.began_s - served.arrived_s
    told["queued_us"] = round(queued_s * _US, 1)
    if served.failed:
        told["failed"] = True
    worker, thread = call.callee, served.began_in
    if queued_s > _QUEUED_S:
        span = (served.arrived_s, served.began_s)
        yield Slice(worker, thread, *span, "queue", f"queued {name}", dict(args), is_apart=True)
    moves = served.began_in != served.ended_in
    run = Slice(worker, thread, served.began_s, served.ended_s, "run", name, told)
    run.flow, run.is_in, run.is_apart = flow, bool(flow), moves
    yield run
    span = (served.ended_s, max(served.answered_s, served.ended_s))
    yield Slice(worker, served.ended_in, *span, "answer", f"answer {name}", dict(args))


def _bytes_of(message: Message | None, name: str) -> dict[str, Any]:
    if message is None:
        return {}
    told: dict[str, Any] = {f"{name}_bytes": message.size_bytes}
    if message.channels:
        told[f"{name}_tensors"] = dict(message.channels)
    return told


def _slices_of_message(
    joined: Joined, message: Message, flow: int, call_of: Mapping[int, Call]
) -> Iterator[Slice]:
    sent, received = message.sent, message.received
    call = call_of.get(id(message))
    what = f"{message.name} {call.function}" if call is not None else message.name
    args: dict[str, Any] = {"kind": message.name, "bytes": message.size_bytes}
    if call is not None:
        args |= {"call": call.key, "function": call.function}
    elif message.number:
        args["number"] = message.number
    if message.context_id > 0:
        args["context"] = message.context_id
        if message.message_id > 0:
            args["message"] = message.message_id
    if message.channels:
        args["tensors"] = dict(message.channels)
    # A request goes on to the function that it starts.
    goes_on = message.kind == Kind.CALL and call is not None and call.served is not None
    if sent is not None:
        told = {**args, "to": joined.name_of(message.receiver)}
        span = (sent.began_s, max(sent.ended_s, sent.began_s))
        one = Slice(message.sender, sent.thread, *span, SEND, f"send {what}", told)
        if received is not None or goes_on:
            one.flow, one.is_out = flow, True
        yield one
    if received is not None:
        told = {**args, "from": joined.name_of(message.sender)}
        at_s = received.at_s
        name = f"receive {what}"
        one = Slice(message.receiver, received.thread, at_s, at_s, RECEIVE, name, told)
        if sent is not None or goes_on:
            one.flow, one.is_in, one.is_out = flow, sent is not None, goes_on
        yield one


def _slices_of_work(worker: WorkerTrace) -> Iterator[Slice]:
    pulled: dict[int, list[Pulled]] = defaultdict(list)
    for record in worker.records:
        if isinstance(record, Pulled):
            pulled[record.thread].append(record)
    for record in worker.records:
        if not isinstance(record, Ran):
            continue
        args: dict[str, Any] = dict(record.details)
        if record.context_id:
            args["context"] = record.context_id
        if record.category == FETCH:
            for each in pulled[record.thread]:
                if record.began_s <= each.at_s <= record.ended_s:
                    tensors = args.setdefault("tensors", {})
                    tensors[each.channel] = tensors.get(each.channel, 0) + each.size_bytes
        name = f"{record.category} {record.name}"
        span = (record.began_s, record.ended_s)
        yield Slice(worker.id, record.thread, *span, record.category, name, args)
    for profiled in worker.profiled:
        track, span = (profiled.device, profiled.lane), (profiled.began_s, profiled.ended_s)
        yield Slice(worker.id, track, *span, PROFILED, profiled.name, {})


def _set_apart(slices: Iterable[Slice]) -> None:
    """Moves slices that overlap others of their thread, without being inside, to own tracks."""
    by_track: dict[tuple[int, Track], list[Slice]] = defaultdict(list)
    for each in slices:
        if not each.is_apart:
            by_track[each.worker, each.track].append(each)
    for track in by_track.values():
        track.sort(key=lambda each: (each.began_s, -each.ended_s))
        around: list[Slice] = []
        for each in track:
            while around and around[-1].ended_s <= each.began_s:
                around.pop()
            if around and each.ended_s > around[-1].ended_s:
                if each.category == SEND:
                    # The answer may be read before the thread that has sent the request goes on.
                    each.ended_s = around[-1].ended_s
                else:
                    each.is_apart = True
            else:
                around.append(each)


# Events


class _Tracks:
    """The tracks of one worker.

    What ``torch.profiler`` has recorded of a thread is on a track of its own, below that of the
    thread: its times were converted from another clock, and need not nest with those of Weft.
    """

    def __init__(self, worker: WorkerTrace) -> None:
        self._threads = worker.threads
        self._names = {each.native_id: each.name for each in worker.threads.values()}
        self._unknown = itertools.count(_UNKNOWN)
        self._numbers: dict[Track, int] = {}
        self.names: dict[int, str] = {}

    def number_of(self, track: Track) -> int:
        """Returns the number of a track, which gets a name."""
        number = self._numbers.get(track)
        if number is None:
            native_id, name = self._described(track)
            number = self._numbers[track] = native_id or next(self._unknown)
            self.names[number] = name
        return number

    def _described(self, track: Track) -> tuple[int, str]:
        if isinstance(track, int):
            return self._threads.get(track, Thread(0, "a thread that has ended"))
        device, lane = track
        if device:
            return 0, f"{device} stream {lane}"
        return 0, f"{self._names.get(lane, f'thread {lane}')}: torch.profiler"


def _events_of(
    place: int, one: Slice, pid: int, tracks: _Tracks, began_s: float
) -> Iterator[Event]:
    began_ns = _ns(one.began_s - began_s)
    began_us = _us(began_ns)
    tid = tracks.number_of(one.track)
    event = {"name": one.name, "cat": one.category, "pid": pid, "tid": tid, "ts": began_us}
    taken_ns = max(_ns(one.ended_s - began_s) - began_ns, 0)
    if not one.is_apart:
        event |= {"ph": "X", "dur": _us(taken_ns), "args": one.args}
        if one.flow and (one.is_in or one.is_out):
            event |= {"bind_id": one.flow, "flow_out": one.is_out, "flow_in": one.is_in}
        yield event
        return
    identity = f"0x{place:x}"
    yield event | {"ph": "b", "id": identity, "args": one.args}
    yield event | {"ph": "e", "id": identity, "ts": _us(began_ns + taken_ns)}
    if one.flow and (one.is_in or one.is_out):
        # An arrow cannot end or begin at such a track: it does at a mark in the thread.
        mark = event | {"ph": "X", "dur": 0, "cat": "mark", "args": {"call": one.args.get("call")}}
        yield mark | {"bind_id": one.flow, "flow_out": one.is_out, "flow_in": one.is_in}


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _us(nanoseconds: int) -> float:
    """Returns microseconds that are so many nanoseconds when a thousand of them are cut off.

    Perfetto cuts them off. The nearest number is sometimes below, and a slice could then end a
    nanosecond after that around it.
    """
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _in_flight(joined: Joined, numbers: Mapping[int, int], began_s: float) -> Iterator[Event]:
    """Yields how many bytes each worker has sent that have not been read yet."""
    changes: list[tuple[float, int, int]] = []
    for message in joined.messages:
        if message.sent is not None and message.received is not None:
            size_bytes = message.size_bytes + sum(
                count for channel, count in message.channels.items() if channel not in ON_CONNECTION
            )
            sent_s = message.sent.began_s
            changes.append((sent_s, message.sender, size_bytes))
            changes.append((max(message.received.at_s, sent_s), message.sender, -size_bytes))
    in_flight: dict[int, int] = defaultdict(int)
    # At one moment, bytes are sent before they are read.
    for at_s, sender, change in sorted(changes, key=lambda each: (each[0], -each[2])):
        in_flight[sender] += change
        yield {
            "name": "bytes in flight",
            "ph": "C",
            "pid": numbers[sender],
            "tid": 0,
            "ts": _us(_ns(at_s - began_s)),
            "args": {"bytes": in_flight[sender]},
        }


def _described(worker: WorkerTrace, pid: int, tracks: _Tracks) -> Iterator[Event]:
    def described(name: str, args: Event, tid: int = 0) -> Event:
        return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}

    title = f"{worker.name} on {worker.host}" if worker.host else worker.name
    yield described("process_name", {"name": title})
    yield described("process_labels", {"labels": f"process {worker.pid}"})
    yield described("process_sort_index", {"sort_index": pid})
    for tid, name in tracks.names.items():
        yield described("thread_name", {"name": name}, tid)
