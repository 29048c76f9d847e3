"""Draws when each action runs: as a picture in SVG, and as trace events.

Perfetto and Chrome's tracing page show trace events. Their format is the JSON object form of the
Trace Event Format. An action is a complete event (``X``). A value that goes to another worker is an
arrow: a flow event that starts (``s``) in the slice of its maker, and one that finishes (``f``) in
the slice that takes it (``"bp": "e"``). Times are microseconds, rounded to nanoseconds before they
are subtracted, so that slices of a track never overlap. Numbers of processes and threads begin at
1: viewers take thread 0 for the idle thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from torchweft.pipeline.schedules.table import (
    KIND_NAMES,
    Action,
    Edges,
    Kind,
    Needs,
    Span,
    results_of,
)

Row = Sequence[Span]
Event = dict[str, Any]

_HUES = {  # in degrees, in the order of the legend
    Kind.FORWARD: 212,
    Kind.BACKWARD: 28,
    Kind.BACKWARD_INPUT: 345,
    Kind.BACKWARD_WEIGHT: 140,
    Kind.UPDATE: 285,
}
_LEFT, _TOP, _ROW, _GAP, _BETWEEN = 78.0, 66.0, 26.0, 5.0, 36.0
"""The left end of rows, the top of the first, height, gap, and height between two timelines."""
_SHORTEST, _LEAST, _WIDEST = 15.0, 620.0, 4000.0
"""Width of the shortest action, unless the picture were to be narrower or wider than its limits."""
_FEW = 4
"""An action is as wide as its label needs if its duration is at least this part of the median."""
_STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#1f2933}"
    ".title{font-size:15px;font-weight:bold}.label{font-size:10px;text-anchor:middle}"
    ".tick{font-size:11px;text-anchor:middle;fill:#52606d}.box{stroke:#fff;stroke-width:.7}"
)


def picture(timelines: Sequence[tuple[str, Sequence[Row]]], unit: str = "") -> str:
    """Returns the picture: a row for each worker, time from the left to the right.

    Args:
        timelines: From the top, the title of each, and its actions by worker; all have one axis.
        unit: The unit of time, for the axis; may be empty.
    """
    rows = [row for _, rows in timelines for row in rows]
    end_s = max((span.end_s for row in rows for span in row), default=0.0)
    scale = _scale(rows, end_s)
    parts = []
    y = _TOP
    for title, its_rows in timelines:
        title_y = y - 12 if y > _TOP else 24
        parts.append(f'<text class="title" x="12" y="{title_y:.1f}">{escape(title)}</text>')
        for worker, row in enumerate(its_rows):
            name_y = y + _ROW / 2 + 4
            parts.append(f'<text class="name" x="12" y="{name_y:.1f}">worker {worker}</text>')
            parts += _boxes(row, y, scale)
            y += _ROW + _GAP
        y += _BETWEEN
    bottom = y - _BETWEEN
    widest = 9.2 * max(len(title) for title, _ in timelines)
    width, height = max(_LEFT + end_s * scale, _LEAST, widest) + 18, bottom + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"><style>{_STYLE}</style>'
        '<rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *_legend(rows), *parts, *_axis(end_s, scale, bottom, unit), "</svg>\n"])


def _scale(rows: Sequence[Row], end_s: float) -> float:
    """Returns the width of a second, at which nearly all actions have room for their labels."""
    spans = [span for row in rows for span in row if span.action.kind is not Kind.UPDATE]
    lengths = sorted(each for span in spans if (each := span.end_s - span.start_s) > 0)
    if not lengths:
        return 1.0
    # A measured timeline has actions that were much shorter than the others by chance.
    short_s = max(lengths[0], lengths[len(lengths) // 2] / _FEW)
    return max(min(_SHORTEST / short_s, _WIDEST / end_s), (_LEAST - _LEFT) / end_s)


def _boxes(row: Row, y: float, scale: float) -> Iterator[str]:
    """Yields a box for each action of a worker; an update that takes no time is a thin one."""
    stages = sorted({span.action.stage for span in row})
    for action, start_s, end_s in row:
        x, width = _LEFT + start_s * scale, max((end_s - start_s) * scale, 1.0)
        colour = _colour(action, stages.index(action.stage), len(stages))
        label = str(action.microbatch)
        text = ""
        if width >= 5.8 * len(label) + 1:
            place = f'x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 3.5:.1f}"'
            text = f'<text class="label" {place}>{label}</text>'
        yield (
            f"<g><title>{action}: {start_s:g} to {end_s:g}</title>"
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_ROW:.1f}" '
            f'fill="{colour}"/>{text}</g>'
        )


def _colour(action: Action, turn: int = 0, n_turns: int = 1) -> str:
    """Returns a colour: darker for later stages, a little darker from micro-batch to micro-batch.

    After eight micro-batches the shades begin again.
    """
    lightness = 88 - 28 * turn / max(n_turns - 1, 1) - 2 * (action.microbatch % 8)
    return f"hsl({_HUES[action.kind]},62%,{lightness:.0f}%)"


def _legend(rows: Sequence[Row]) -> Iterator[str]:
    kinds = {span.action.kind for row in rows for span in row}
    x = 12.0
    for kind in _HUES:
        if kind in kinds:
            colour = _colour(Action(0, kind, 3))
            yield f'<rect x="{x:.0f}" y="38" width="13" height="13" fill="{colour}"/>'
            yield f'<text class="note" x="{x + 18:.0f}" y="49">{KIND_NAMES[kind]}</text>'
            x += 36 + 6.6 * len(KIND_NAMES[kind])


def _axis(end_s: float, scale: float, bottom: float, unit: str) -> Iterator[str]:
    # The smallest of 1, 2 and 5 times a power of ten that is at least as wide as a label.
    power = 10.0 ** math.floor(math.log10(45 / scale))
    step_s = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 45 / scale)
    y = bottom + 21
    for tick in range(math.floor(end_s / step_s + 1e-9) + 1):
        x, label = _LEFT + tick * step_s * scale, f"{round(tick * step_s, 9):g}"
        yield f'<path d="M{x:.1f} {bottom + 2:.1f}v6" stroke="#52606d"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{y:.1f}">{label}</text>'
    name = f"time, {unit}" if unit else "time"
    yield f'<text class="name" x="12" y="{y:.1f}">{name}</text>'


# Trace events


def trace_events(title: str, rows: Sequence[Row], edges: Edges) -> str:
    """Returns the trace events in JSON.

    Args:
        title: The name of the process that has the workers as its threads.
        rows: For each worker its actions with their times.
        edges: The stage graph, as pairs of stages.
    """
    events = [_event("M", 0, name="process_name", args={"name": title})]
    for worker, row in enumerate(rows):
        named: Event = {"name": f"worker {worker}"}
        events.append(_event("M", worker, name="thread_name", args=named))
        events.append(_event("M", worker, name="thread_sort_index", args={"sort_index": worker}))
        events += [_slice(worker, span) for span in row]
    events += _arrows(rows, edges)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def _event(phase: str, worker: int, **fields: Any) -> Event:
    return {"ph": phase, "pid": 1, "tid": worker + 1, **fields}


def _slice(worker: int, span: Span) -> Event:
    action, start_ns, end_ns = span.action, _ns(span.start_s), _ns(span.end_s)
    kind = KIND_NAMES[action.kind]
    return _event(
        "X",
        worker,
        name=str(action),
        cat=kind,
        ts=start_ns / 1000,
        dur=(end_ns - start_ns) / 1000,
        args={"stage": action.stage, "microbatch": action.microbatch, "kind": kind},
    )


def _arrows(rows: Sequence[Row], edges: Edges) -> Iterator[Event]:
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
                common = {"name": name, "cat": "value", "id": number}
                yield _event("s", maker, ts=_middle(made), **common)
                yield _event("f", worker, bp="e", ts=_middle(span), **common)


def _has_length(span: Span) -> bool:
    return _ns(span.end_s) > _ns(span.start_s) + 1


def _middle(span: Span) -> float:
    """Returns a time that is surely in the span's slice; its ends may be another slice's, too."""
    return (_ns(span.start_s) + _ns(span.end_s)) // 2 / 1000


def _ns(time_s: float) -> int:
    return round(1e9 * time_s)
