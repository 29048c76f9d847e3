"""Writes when each action runs as trace events, which Perfetto and Chrome's tracing page show.

The format is the JSON object form of the Trace Event Format. An action is a complete event (``X``).
A value that goes to another worker is an arrow: a flow event that starts (``s``) in the slice
of its maker, and one that finishes (``f``) in the slice that takes it (``"bp": "e"``). Times are
microseconds, rounded to nanoseconds before they are subtracted, so that slices of a track never
overlap. Numbers of processes and threads begin at 1: viewers take thread 0 for the idle thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torchweft.pipeline.schedules.actions import KIND_NAMES, Action, Kind
from torchweft.pipeline.schedules.execution import Edges, Needs, Span, results_of

Event = dict[str, Any]

_PROCESS = 1


def trace(title: str, rows: Sequence[Sequence[Span]], edges: Edges) -> str:
    """Returns the trace events in JSON.

    Args:
        title: The name of the process that has the workers as its threads.
        rows: For each worker its actions with their times.
        edges: The stage graph, as pairs of stages.
    """
    events = [_metadata("process_name", 0, {"name": title})]
    for worker, row in enumerate(rows):
        events.append(_metadata("thread_name", worker, {"name": f"worker {worker}"}))
        events.append(_metadata("thread_sort_index", worker, {"sort_index": worker}))
        events += [_slice(worker, span) for span in row]
    events += _arrows(rows, edges)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _metadata(name: str, worker: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": worker + 1, "args": args}


def _slice(worker: int, span: Span) -> Event:
    action, start_ns, end_ns = span.action, _ns(span.start_s), _ns(span.end_s)
    return {
        "ph": "X",
        "name": str(action),
        "cat": KIND_NAMES[action.kind],
        "pid": _PROCESS,
        "tid": worker + 1,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {
            "stage": action.stage,
            "microbatch": action.microbatch,
            "kind": KIND_NAMES[action.kind],
        },
    }


def _arrows(rows: Sequence[Sequence[Span]], edges: Edges) -> Iterator[Event]:
    makers: dict[Action, tuple[int, Span]] = {
        result: (worker, span)
        for worker, row in enumerate(rows)
        for span in row
        for result in results_of(span.action)
    }
    needs = Needs([[span.action for span in row] for row in rows], edges)
    number = 0
    for worker, row in enumerate(rows):
        for span in row:
            for need in needs.of(span.action):
                maker, made = makers[need]
                if maker == worker or not (_has_length(made) and _has_length(span)):
                    continue  # An arrow needs slices that can hold its ends.
                number += 1
                name = "activation" if need.kind is Kind.FORWARD else "gradient"
                common = {"name": name, "cat": "value", "id": number, "pid": _PROCESS}
                yield {"ph": "s", "tid": maker + 1, "ts": _middle(made), **common}
                yield {"ph": "f", "bp": "e", "tid": worker + 1, "ts": _middle(span), **common}


def _has_length(span: Span) -> bool:
    return _ns(span.end_s) > _ns(span.start_s) + 1


def _middle(span: Span) -> float:
    """Returns a time that is surely in the span's slice; its ends may be another slice's, too."""
    return (_ns(span.start_s) + _ns(span.end_s)) // 2 / 1000


def _ns(time_s: float) -> int:
    return round(1e9 * time_s)
