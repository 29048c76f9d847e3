"""Compares measured timelines with the prediction from their own durations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from torchweft.pipeline.schedules.actions import Action, Kind
from torchweft.pipeline.schedules.execution import Needs, Span, chain, results_of
from torchweft.pipeline.schedules.prediction import Costs
from torchweft.pipeline.schedules.timeline import Timeline


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
    needs = Needs(timeline.table.rows, edges)
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
    width = max(map(len, (*names, "worker")))
    line = f"{{:{width}}}  {{:>8}}  {{:>9}}  {{:>8}}  {{:>9}}".format
    lines = [
        f"{predicted.table.name}, {steps} measured",
        f"{'':{width}}  {'idle':^19}  {'activations held':^19}".rstrip(),
        line("worker", *["measured", "predicted"] * 2),
    ]
    columns = zip(*[each.idle_shares for each in measured], strict=True)
    rows = zip(
        names, columns, predicted.idle_shares, peak_held, predicted.peak_activations, strict=True
    )
    for name, idle, expected, held, kept in rows:
        lines.append(line(name, _percent(fmean(idle)), _percent(expected), held, kept))
    idle_share = fmean(each.idle_share for each in measured)
    lines.append(line("all", _percent(idle_share), _percent(predicted.idle_share), "", ""))
    took_s = median(each.makespan_s for each in measured)
    lines.append(line(step, _seconds(took_s), _seconds(predicted.makespan_s), "", ""))
    return "\n".join(each.rstrip() for each in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
