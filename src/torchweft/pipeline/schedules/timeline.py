"""When each action of a table runs, predicted or measured, and all that follows from it.

A prediction follows from the durations of actions and messages. Measured timelines give these
durations, so they are compared with the prediction from their own costs. A timeline is drawn as a
picture in SVG, and as trace events.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from torchweft.arguments import wrong_type
from torchweft.columns import aligned
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules.pipedream import versions_of
from torchweft.pipeline.schedules.table import (
    KIND_NAMES,
    Action,
    Dependencies,
    Edges,
    Kind,
    Span,
    Table,
    chain,
    check,
    checked_edges,
    results_of,
    run,
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action of a table runs: as predicted, or as measured on workers.

    Attributes:
        table: The table.
        spans: For each worker its actions with their start and end, in the order of its row. A
            measured span begins when all values that the action needs are there, and ends when its
            results are sent.
        edges: The stage graph, as pairs of stages; None for a chain.
        is_measured: Whether the times are measured, in seconds. Those of a prediction have the
            unit of its costs.
    """

    table: Table
    spans: tuple[tuple[Span, ...], ...]
    edges: Edges | None = None
    is_measured: bool = False

    @property
    def makespan_s(self) -> float:
        """The end of the last action; the first one starts at 0."""
        return max((span.end_s for row in self.spans for span in row), default=0.0)

    @property
    def idle_share(self) -> float:
        """The share of the workers' time, up to the makespan, in which they are idle."""
        shares = self.idle_shares
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each worker, the share of the makespan in which it is idle."""
        whole_s = self.makespan_s
        busy_s = [sum(span.end_s - span.start_s for span in row) for row in self.spans]
        return tuple(1 - each / whole_s if whole_s else 0.0 for each in busy_s)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each worker, the most forward passes whose activations it keeps at once.

        The end of the backward pass frees them; of a split backward pass, the end of its weight
        part. A worker with several stages keeps those of each.
        """
        return tuple(map(_peak_activations, self.table.rows))

    @property
    def peak_versions(self) -> tuple[int, ...]:
        """For each worker, the most versions of a stage's parameters that it keeps at once."""
        return versions_of(self.table).held

    @property
    def title(self) -> str:
        """The schedule with its numbers, and the idle share."""
        batches = "minibatches" if self.table.is_asynchronous else "micro-batches"
        return (
            f"{self.table.name}: {self.table.n_workers} workers, {self.table.n_stages} stages, "
            f"{self.table.n_microbatches} {batches}, {100 * self.idle_share:.1f} % idle"
            + (", measured" if self.is_measured else "")
        )

    def svg(self, *others: Timeline) -> str:
        """Returns the timeline as a picture in SVG: a row for each worker, time from the left.

        The colour stands for the kind of an action, its shade for the micro-batch, which is also
        the label. Of several stages of a worker, the later ones are darker. The title of each box,
        which viewers show on hovering, has the action and its time; that of the picture has the
        idle share.

        Args:
            others: Timelines to draw below, on the same axis of time; for instance the predicted
                one below the measured one.
        """
        every = (self, *others)
        unit = "s" if all(each.is_measured for each in every) else ""
        return picture([(each.title, each.spans) for each in every], unit)

    def trace(self) -> str:
        """Returns the timeline as trace events in JSON, which ui.perfetto.dev and Chrome show.

        Each worker is a track, and each action a slice with its stage, micro-batch and kind. Arrows
        lead from an action to those on other workers that wait for its results. A unit of time
        is shown as a second.
        """
        edges = chain(self.table.n_stages) if self.edges is None else self.edges
        return trace_events(self.title, self.spans, edges)


def _peak_activations(row: Sequence[Action]) -> int:
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    kept = accumulate((changes.get(action.kind, 0) for action in row), initial=0)
    return max(kept)


# Predicted


@dataclass(frozen=True, slots=True)
class Costs:
    """How long the actions and messages of a table take.

    Attributes:
        duration_s: The duration of an action by stage and kind, in seconds or any other unit.
        latency_s: The time from the end of an action until another worker has its result.

    Raises:
        ConfigurationError: A time is negative or not finite.
        ArgumentTypeError: A time is no number.
    """

    duration_s: Mapping[tuple[int, Kind], float]
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        times: dict[str, object] = {"latency_s": self.latency_s}
        for (stage, kind), duration_s in self.duration_s.items():
            times[f"duration_s[{stage}, {kind}]"] = duration_s
        for name, time in times.items():
            if not isinstance(time, (int, float)):
                raise wrong_type(name, time, "pass a number of seconds")
            if not 0 <= time < math.inf:
                raise ConfigurationError(f"{name} is {time!r}; pass a number of seconds, 0 or more")

    @classmethod
    def uniform(
        cls,
        n_stages: int,
        *,
        forward_s: float = 1.0,
        input_s: float = 1.0,
        weight_s: float = 1.0,
        update_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> Costs:
        """Returns costs that are the same for all stages.

        Args:
            n_stages: The number of stages.
            forward_s: A forward pass.
            input_s: The input part of a backward pass.
            weight_s: Its weight part; a whole backward pass takes the sum of both.
            update_s: An update.
            latency_s: A message.
        """
        times = {
            Kind.FORWARD: forward_s,
            Kind.BACKWARD: input_s + weight_s,
            Kind.BACKWARD_INPUT: input_s,
            Kind.BACKWARD_WEIGHT: weight_s,
            Kind.UPDATE: update_s,
        }
        durations = {(stage, kind): times[kind] for stage in range(n_stages) for kind in Kind}
        return cls(durations, latency_s)

    def of(self, action: Action) -> float:
        """Returns the duration of an action.

        Raises:
            ConfigurationError: The costs have no duration for its stage and kind.
        """
        try:
            return self.duration_s[action.stage, action.kind]
        except KeyError:
            raise ConfigurationError(
                f"the costs have no duration for {action}: set duration_s[{action.stage}, "
                f"{action.kind}]"
            ) from None


def predict(table: Table, costs: Costs, edges: Edges | None = None) -> Timeline:
    """Predicts when each action runs: as early as its worker's row and its data permit.

    Args:
        table: The table.
        costs: Durations of actions and messages.
        edges: The stage graph, as pairs of stages; a chain if it is not given.

    Raises:
        TableError: The table cannot be run; see ``check``.
        ConfigurationError: A duration is missing, or an edge names an unknown stage.
    """
    check(table, edges)
    edges = checked_edges(table, edges)
    ran = run(table.rows, edges, costs.of, costs.latency_s)
    return Timeline(table, ran.spans, tuple(edges))


# Measured


def measured_costs(timelines: Sequence[Timeline]) -> Costs:
    """Returns the median duration of the actions of each stage and kind, and of a message.

    A message's duration is seen where a worker had nothing to do but wait for it. Where no worker
    ever waited, and where values arrive before their maker has noted its end, it is 0.
    """
    durations_s: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timeline in timelines:
        for row in timeline.spans:
            for action, start_s, end_s in row:
                durations_s[action.stage, action.kind].append(end_s - start_s)
    latencies_s = [each for timeline in timelines for each in _latencies(timeline)]
    latency_s = max(median(latencies_s), 0.0) if latencies_s else 0.0
    return Costs({key: median(found) for key, found in durations_s.items()}, latency_s)


def _latencies(timeline: Timeline) -> Iterator[float]:
    """Yields the durations of the messages that workers waited for."""
    edges = chain(timeline.table.n_stages) if timeline.edges is None else timeline.edges
    needs = Dependencies(timeline.table.rows, edges)
    made: dict[Action, tuple[int, Span]] = {
        result: (worker, span)
        for worker, row in enumerate(timeline.spans)
        for span in row
        for result in results_of(span.action)
    }
    for worker, row in enumerate(timeline.spans):
        free_s = 0.0
        for action, start_s, end_s in row:
            sent_s = [made[need][1].end_s for need in needs.of(action) if made[need][0] != worker]
            if sent_s and max(sent_s) > free_s and start_s > free_s:
                yield start_s - max(sent_s)
            free_s = end_s


def report(
    measured: Sequence[Timeline],
    predicted: Timeline,
    names: Sequence[str],
    peak_held: Sequence[int],
) -> str:
    """Returns a table with a line for each worker: measured figures beside predicted ones.

    Args:
        measured: The steps; their idle shares are averaged.
        predicted: The timeline to compare them with.
        names: The workers' names.
        peak_held: For each worker, the most forward passes whose activations it kept.
    """
    step = "run" if predicted.table.is_asynchronous else "step"
    steps = f"{len(measured)} {step}s" if len(measured) > 1 else f"1 {step}"
    idle = [fmean(shares) for shares in zip(*[m.idle_shares for m in measured], strict=True)]
    all_idle = fmean(each.idle_share for each in measured)
    took_s = median(each.makespan_s for each in measured)
    rows = [["worker", *["measured", "predicted"] * 2]]
    for name, *shares, held, kept in zip(
        names, idle, predicted.idle_shares, peak_held, predicted.peak_activations, strict=True
    ):
        rows.append([name, *map(_percent, shares), str(held), str(kept)])
    rows.append(["all", _percent(all_idle), _percent(predicted.idle_share), "", ""])
    rows.append([step, _seconds(took_s), _seconds(predicted.makespan_s), "", ""])
    lines = aligned(rows, [True, False, False, False, False])
    width = max(len(row[0]) for row in rows)
    head = f"{'':{width}}  {'idle':^19}  {'activations held':^19}".rstrip()
    return "\n".join([f"{predicted.table.name}, {steps} measured", head, *lines])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


# Drawn. Perfetto and Chrome's tracing page show trace events. Their format is the JSON object form
# of the Trace Event Format. An action is a complete event (``X``). A value that goes to another
# worker is an arrow: a flow event that starts (``s``) in the slice of its maker, and one that
# finishes (``f``) in the slice that takes it (``"bp": "e"``). Times are microseconds, rounded to
# nanoseconds before they are subtracted, so that slices of a track never overlap. Numbers of
# processes and threads begin at 1: viewers take thread 0 for the idle thread.

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
    needs = Dependencies([[span.action for span in row] for row in rows], edges)
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
