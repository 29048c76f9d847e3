"""When each action of a table runs, predicted or measured, and all that follows from it.

A prediction follows from the durations of actions and messages. Measured timelines give these
durations, so they are compared with the prediction from their own costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from torchweft.arguments import wrong_type
from torchweft.columns import aligned
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules.checks import check, checked_edges
from torchweft.pipeline.schedules.picture import picture, trace_events
from torchweft.pipeline.schedules.pipedream import versions_of
from torchweft.pipeline.schedules.table import (
    Action,
    Edges,
    Kind,
    Needs,
    Span,
    Table,
    chain,
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
