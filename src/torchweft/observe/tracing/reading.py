"""Reads the file of a trace: its summary, and the distributed graph of an autograd context.

Reads only what Weft has written. ``FORMAT`` counts the changes of what Weft adds to the Trace Event
Format, so that the file of another version is refused or understood.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torchweft.columns import printable
from torchweft.errors import ObserveError
from torchweft.files import open_plain
from torchweft.observe.text import Table, seconds, size

FORMAT = 1
"""Version of the entry ``weft`` of a file, and of the arguments of its events."""
SEND, RECEIVE, RUN = "send", "receive", "run"
"""Categories of slices at the ends of arrows, beside those of calls."""
FETCH, BACKWARD, STEP = "fetch", "backward", "optimizer"
"""Categories of work: tensors are fetched, a part of a pass runs, an optimizer steps."""
ON_CONNECTION = ("inline", "stream")
"""Channels whose bytes are among those of the message."""

_US = 1e-6
_MOST_FUNCTIONS = 20
_MOST_CALLS = 10
_TITLES = {
    RUN: "functions, at the callee",
    "call": "calls, at the caller",
    BACKWARD: "backward passes",
    STEP: "optimizers",
}

_DAMAGES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What comes of values of other types than Weft writes, and of impossible numbers."""


@contextlib.contextmanager
def telling_damage() -> Iterator[None]:
    """Raises ObserveError where the block fails because of what a trace has."""
    try:
        yield
    except _DAMAGES as error:
        raise ObserveError(f"the trace is damaged: {error!r}") from None


class Entry(NamedTuple):
    """Something in a file that takes time.

    Attributes:
        worker: The name of the worker.
        category: Its category.
        name: Its name.
        began_s: When it began, in seconds since the begin of the trace.
        ended_s: When it ended.
        args: What is known about it.
        arrow: The number of the arrow that begins, goes through or ends here; 0 for none.
    """

    worker: str
    category: str
    name: str
    began_s: float
    ended_s: float
    args: dict[str, Any]
    arrow: int

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


class TraceFile(NamedTuple):
    """The content of a file.

    Attributes:
        about: What the file says about the trace as a whole.
        workers: The names of the workers, by rank.
        slices: All slices, by the time of their begin.
    """

    about: dict[str, Any]
    workers: tuple[str, ...]
    slices: tuple[Entry, ...]


def load(path: str | os.PathLike[str]) -> TraceFile:
    """Reads a trace.

    Raises:
        ObserveError: The file cannot be read, or is no trace of Weft.
    """
    try:
        with open_plain(path) as file:
            content = _escaped(json.load(file))
    except OSError as error:
        raise ObserveError(f"{os.fspath(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ObserveError(f"{os.fspath(path)!r} is no trace: it is no JSON: {error}") from None
    about = content.get("weft") if isinstance(content, dict) else None
    if not isinstance(about, dict):
        raise ObserveError(
            f"{os.fspath(path)!r} is no trace of Weft; make one by torchweft.observe.trace"
        )
    if about.get("format") != FORMAT:
        raise ObserveError(
            f"{os.fspath(path)!r} has format {about.get('format')}, and this version of Weft reads "
            f"{FORMAT}; use the version that has written it"
        )
    try:
        names = tuple(each["name"] for each in about["workers"])
        slices = sorted(_slices(content["traceEvents"], names), key=lambda each: each.began_s)
    except _DAMAGES as error:
        raise ObserveError(f"{os.fspath(path)!r} is damaged: {error!r}") from None
    return TraceFile(about, names, tuple(slices))


def _escaped(value: Any) -> Any:
    """Returns what a file has, with all characters escaped that control a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _escaped(each) for key, each in value.items()}
    return value


def _slices(events: Iterable[dict[str, Any]], names: tuple[str, ...]) -> Iterator[Entry]:
    begun: dict[Any, dict[str, Any]] = {}
    for event in events:
        phase = event["ph"]
        if phase == "b":
            begun[event["cat"], event["id"]] = event
        elif phase == "e":
            first = begun.pop((event["cat"], event["id"]))
            yield _slice(first, event["ts"], names)
        elif phase == "X":
            yield _slice(event, event["ts"] + event["dur"], names)


def _slice(event: dict[str, Any], ended_us: float, names: tuple[str, ...]) -> Entry:
    return Entry(
        names[event["pid"] - 1],
        event["cat"],
        event["name"],
        event["ts"] * _US,
        ended_us * _US,
        event.get("args", {}),
        event.get("bind_id", 0),
    )


# The summary


def summary(trace: TraceFile) -> list[Table | str]:
    """Returns what a trace shows, to be printed; raises ObserveError if it is damaged."""
    with telling_damage():
        return [_title(trace), *_tables(trace), *_notes(trace)]


def _title(trace: TraceFile) -> str:
    begin_s = min((each.began_s for each in trace.slices), default=0.0)
    end_s = max((each.ended_s for each in trace.slices), default=0.0)
    count = len(trace.workers)
    error_us = trace.about["clock_error_us"]
    clocks = f"clocks within {seconds(error_us * _US)}" if error_us else "one clock"
    return f"{count} worker{'s' if count > 1 else ''}, {seconds(end_s - begin_s)}, {clocks}"


def _notes(trace: TraceFile) -> Iterator[str]:
    for name, why in trace.about["missing"].items():
        yield f"nothing of {name}: {why}"
    for each in trace.about["workers"]:
        if each["dropped"]:
            count = each["dropped"]
            yield f"{each['name']} had no room for {count} records; raise limit=, or trace less"


def _tables(trace: TraceFile) -> Iterator[Table]:
    by_category: dict[str, list[Entry]] = defaultdict(list)
    for each in trace.slices:
        by_category[each.category].append(each)
    yield _workers(trace)
    for category, title in _TITLES.items():
        if by_category[category]:
            yield _functions(title, by_category[category], category == RUN)
    if by_category[SEND]:
        yield _channels(by_category[SEND])
    if by_category["call"]:
        yield _slowest(by_category["call"], by_category[RUN])


def _workers(trace: TraceFile) -> Table:
    rows = []
    for about in trace.about["workers"]:
        own = [each for each in trace.slices if each.worker == about["name"]]
        made = [each for each in own if each.category in ("call", "create")]
        served = [each for each in own if each.category == "run"]
        sent = [each for each in own if each.category == SEND]
        row = (len(made), len(served), len(sent))
        sent_bytes = sum(each.args["bytes"] + _apart(each) for each in sent)
        rows.append([about["name"], about["host"], *map(str, row), size(sent_bytes)])
    return Table("", "worker host calls served messages sent".split(), rows, 2)


def _apart(message: Entry) -> int:
    tensors = message.args.get("tensors", {})
    return sum(count for name, count in tensors.items() if name not in ON_CONNECTION)


def _functions(title: str, slices: Iterable[Entry], has_queue: bool) -> Table:
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for each in slices:
        by_name[each.args.get("function", each.name)].append(each)
    rows = []
    for name, group in sorted(by_name.items(), key=lambda pair: -_total(pair[1]))[:_MOST_FUNCTIONS]:
        times = sorted(each.duration_s for each in group)
        middle = times[len(times) // 2]
        row = [name, str(len(group)), *map(seconds, (_total(group), middle, times[-1]))]
        if has_queue:
            row.append(seconds(sum(each.args["queued_us"] for each in group) * _US))
        rows.append(row)
    heads = ["name", "count", "total", "p50", "longest", *(["queued"] if has_queue else [])]
    return Table(title, heads, rows, 1)


def _total(slices: Iterable[Entry]) -> float:
    return sum(each.duration_s for each in slices)


def _channels(sent: Iterable[Entry]) -> Table:
    counts: dict[str, int] = defaultdict(int)
    sums: dict[str, int] = defaultdict(int)
    for each in sent:
        counts["messages"] += 1
        sums["messages"] += each.args["bytes"]
        for name, count in each.args.get("tensors", {}).items():
            name = f"of them tensors, {name}" if name in ON_CONNECTION else f"tensors by {name}"
            counts[name] += 1
            sums[name] += count
    rows = [[name, str(counts[name]), size(sums[name])] for name in sums]
    return Table("bytes", ["", "messages", "bytes"], rows, 1)


def _slowest(calls: Iterable[Entry], runs: Iterable[Entry]) -> Table:
    run_of = {each.args["call"]: each for each in runs}
    rows = []
    for call in sorted(calls, key=lambda each: -each.duration_s)[:_MOST_CALLS]:
        row = [call.args["function"], call.worker, call.args["to"], seconds(call.duration_s)]
        run = run_of.get(call.args["call"])
        if run is None:
            row += ["-", "-", "-"]
        else:
            queued_s = run.args["queued_us"] * _US
            rest_s = max(call.duration_s - queued_s - run.duration_s, 0.0)
            row += map(seconds, (queued_s, run.duration_s, rest_s))
        rows.append(row)
    return Table("slowest calls", "function caller callee time queued ran rest".split(), rows, 3)


# The graph of an autograd context

_FORWARD, _BACKWARD = "forward", "backward"
_KINDS = {
    "call": "call",
    "reply": "result",
    "post": "values",
    "gradients": "gradients",
}
"""The messages of the graph, by their kind, and how the graph names them."""


class Edge(NamedTuple):
    """A message of the graph.

    Attributes:
        direction: ``"forward"``, or ``"backward"`` for gradients.
        sender: The name of the sender.
        receiver: The name of the receiver.
        what: The kind of the message, and the function of its call.
        size_bytes: Its bytes, tensors of all channels included.
        channels: Bytes of tensors by channel.
        at_s: When it was sent, in seconds since the first message.
        taken_s: Time from sending to receiving, in seconds; -1 if one end is missing.
    """

    direction: str
    sender: str
    receiver: str
    what: str
    size_bytes: int
    channels: dict[str, int]
    at_s: float
    taken_s: float


class Part(NamedTuple):
    """Parts of the backward pass that ran on one worker.

    Attributes:
        worker: The name of the worker.
        runs: How many parts ran.
        taken_s: How long they took together, in seconds.
        operations: The names of their operations, and how many there were.
    """

    worker: str
    runs: int
    taken_s: float
    operations: dict[str, int]


class Graph(NamedTuple):
    """The distributed graph of a context.

    Attributes:
        context_id: The number of the context.
        workers: The names of the workers, by rank.
        edges: The messages in the order of time.
        parts: The backward pass on each worker that has a part of it.
    """

    context_id: int
    workers: tuple[str, ...]
    edges: tuple[Edge, ...]
    parts: tuple[Part, ...]

    def text(self) -> str:
        """Returns the graph as text: sums for each pair of workers, the passes, the messages."""
        lines = [
            f"context {self.context_id}: {len(self.workers)} workers, {len(self.edges)} messages, "
            f"{size(sum(each.size_bytes for each in self.edges))}"
        ]
        sums: dict[tuple[str, str, str], list[Edge]] = defaultdict(list)
        for edge in self.edges:
            sums[edge.direction, edge.sender, edge.receiver].append(edge)
        for (direction, sender, receiver), edges in sums.items():
            times = [edge.taken_s for edge in edges if edge.taken_s >= 0]
            time = f", {seconds(sum(times))} on the way" if times else ""
            total = size(sum(edge.size_bytes for edge in edges))
            lines.append(
                f"  {direction:8}  {sender} -> {receiver}: {_messages(len(edges))}, {total}{time}"
            )
        for part in self.parts:
            names = ", ".join(_times(name, count) for name, count in part.operations.items())
            lines.append(
                f"  backward  on {part.worker}: {seconds(part.taken_s)} in {part.runs} "
                f"part{'s' if part.runs > 1 else ''}: {names or 'leaves'}"
            )
        lines.append("messages, in the order of time")
        lines += [f"  {_line(edge)}" for edge in self.edges]
        return "\n".join(lines)


def graph_of(trace: TraceFile, context_id: int) -> Graph:
    """Returns the graph of a context.

    Raises:
        ObserveError: No message of the context is in the trace; the error names those that are.
            Or the trace is damaged.
    """
    with telling_damage():
        return _graph_of(trace, context_id)


def _graph_of(trace: TraceFile, context_id: int) -> Graph:
    sent = [each for each in trace.slices if each.category == SEND and each.args["kind"] in _KINDS]
    found = [each for each in sent if each.args.get("context") == context_id]
    if not found:
        others = sorted({each.args["context"] for each in sent if "context" in each.args})
        known = f"it has those of {', '.join(map(str, others))}" if others else "it has none at all"
        raise ObserveError(f"the trace has no message of autograd context {context_id}; {known}")
    received = {
        each.arrow: each for each in trace.slices if each.category == RECEIVE and each.arrow
    }
    edges = [_edge(each, received.get(each.arrow), found[0].began_s) for each in found]
    present = {name for edge in edges for name in (edge.sender, edge.receiver)}
    names = [name for name in trace.workers if name in present]
    names += sorted(present.difference(names))
    return Graph(context_id, tuple(names), tuple(edges), tuple(_parts(trace, context_id)))


def _edge(sent: Entry, received: Entry | None, begin_s: float) -> Edge:
    args = sent.args
    return Edge(
        _BACKWARD if args["kind"] == "gradients" else _FORWARD,
        sent.worker,
        args["to"],
        " ".join(filter(None, (_KINDS[args["kind"]], args.get("function", "")))),
        args["bytes"] + _apart(sent),
        args.get("tensors", {}),
        sent.began_s - begin_s,
        -1.0 if received is None else max(received.began_s - sent.began_s, 0.0),
    )


def _parts(trace: TraceFile, context_id: int) -> Iterator[Part]:
    for worker in trace.workers:
        runs, taken_s = 0, 0.0
        operations: dict[str, int] = defaultdict(int)
        for each in trace.slices:
            is_part = each.category == BACKWARD and each.args.get("context") == context_id
            if is_part and each.worker == worker:
                runs += 1
                taken_s += each.ended_s - each.began_s
                for name, count in each.args["operations"].items():
                    operations[name] += count
        if runs:
            yield Part(worker, runs, taken_s, dict(operations))


def _line(edge: Edge) -> str:
    taken = f", {seconds(edge.taken_s)}" if edge.taken_s >= 0 else ""
    channels = ", ".join(f"{name} {size(count)}" for name, count in edge.channels.items())
    tensors = f" ({channels})" if channels else ""
    arrow = f"{edge.sender} -> {edge.receiver}"
    return f"{seconds(edge.at_s):>9}  {arrow}  {edge.what}: {size(edge.size_bytes)}{tensors}{taken}"


def _messages(count: int) -> str:
    return f"{count} message{'s' if count > 1 else ''}"


def _times(name: str, count: int) -> str:
    return f"{name} x {count}" if count > 1 else name
