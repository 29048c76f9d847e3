"""Reads the file of a trace, and summarises it for ``torchweft trace``.

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
from torchweft.observe.text import Table, drawn, seconds, size

FORMAT = 1
"""Version of the entry ``weft`` of a file, and of the arguments of its events."""
SEND, RECEIVE = "send", "receive"
PROFILED = "torch.profiler"
"""Category of what it has recorded."""
ON_CONNECTION = ("inline", "stream")
"""Channels whose bytes are among those of the message."""

_US = 1e-6
_MOST_FUNCTIONS = 20
_MOST_CALLS = 10


_DAMAGES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What comes of values of other types than Weft writes, and of impossible numbers."""


@contextlib.contextmanager
def telling_damage() -> Iterator[None]:
    """Raises ObserveError where the block fails because of what a trace has."""
    try:
        yield
    except _DAMAGES as error:
        raise ObserveError(f"the trace is damaged: {error!r}") from None


class Slice(NamedTuple):
    """Something in a trace that takes time.

    Attributes:
        worker: The name of the worker.
        track: The number of its track.
        category: Its category.
        name: Its name.
        began_s: When it began, in seconds since the begin of the trace.
        ended_s: When it ended.
        args: What is known about it.
        flow: The number of an arrow; 0 for none.
        is_out: Whether that arrow goes on from here.
        is_in: Whether it comes from elsewhere.
    """

    worker: str
    track: int
    category: str
    name: str
    began_s: float
    ended_s: float
    args: dict[str, Any]
    flow: int
    is_out: bool
    is_in: bool

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
    slices: tuple[Slice, ...]


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


def _slices(events: Iterable[dict[str, Any]], names: tuple[str, ...]) -> Iterator[Slice]:
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


def _slice(event: dict[str, Any], ended_us: float, names: tuple[str, ...]) -> Slice:
    return Slice(
        names[event["pid"] - 1],
        event["tid"],
        event["cat"],
        event["name"],
        event["ts"] * _US,
        ended_us * _US,
        event.get("args", {}),
        event.get("bind_id", 0),
        event.get("flow_out", False),
        event.get("flow_in", False),
    )


# The summary


def summary(trace: TraceFile) -> str:
    """Returns what a trace shows, as text; raises ObserveError if it is damaged."""
    with telling_damage():
        parts = [_title(trace), *map(drawn, _tables(trace)), *_notes(trace)]
    return "\n\n".join(filter(None, parts))


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
        dropped = each["dropped"] + each["profiled_dropped"]
        if dropped:
            yield f"{each['name']} had no room for {dropped} records; raise limit=, or trace less"


def _tables(trace: TraceFile) -> Iterator[Table]:
    by_category: dict[str, list[Slice]] = defaultdict(list)
    for each in trace.slices:
        by_category[each.category].append(each)
    yield _workers(trace)
    if by_category["run"]:
        yield _functions("functions, at the callee", by_category["run"], "queued")
    if by_category["call"]:
        yield _functions("calls, at the caller", by_category["call"], "")
    if by_category["backward"]:
        yield _functions("backward passes", by_category["backward"], "")
    if by_category["optimizer"]:
        yield _functions("optimizers", by_category["optimizer"], "")
    if by_category[SEND]:
        yield _channels(by_category[SEND])
    if by_category["call"]:
        yield _slowest(by_category["call"], by_category["run"])


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


def _apart(message: Slice) -> int:
    tensors = message.args.get("tensors", {})
    return sum(count for name, count in tensors.items() if name not in ON_CONNECTION)


def _functions(title: str, slices: Iterable[Slice], queued: str) -> Table:
    by_name: dict[str, list[Slice]] = defaultdict(list)
    for each in slices:
        by_name[each.args.get("function", each.name)].append(each)
    rows = []
    for name, group in sorted(by_name.items(), key=lambda pair: -_total(pair[1]))[:_MOST_FUNCTIONS]:
        times = sorted(each.duration_s for each in group)
        middle = times[len(times) // 2]
        row = [name, str(len(group)), *map(seconds, (_total(group), middle, times[-1]))]
        if queued:
            row.append(seconds(sum(each.args["queued_us"] for each in group) * _US))
        rows.append(row)
    heads = ["name", "count", "total", "p50", "longest", *([queued] if queued else [])]
    return Table(title, heads, rows, 1)


def _total(slices: Iterable[Slice]) -> float:
    return sum(each.duration_s for each in slices)


def _channels(sent: Iterable[Slice]) -> Table:
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


def _slowest(calls: Iterable[Slice], runs: Iterable[Slice]) -> Table:
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
