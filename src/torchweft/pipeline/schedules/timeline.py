"""When each action of a table runs, predicted or measured, and all that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchweft.pipeline.schedules.actions import Action, Kind
from torchweft.pipeline.schedules.execution import Edges, Span, chain
from torchweft.pipeline.schedules.picture import Panel, draw
from torchweft.pipeline.schedules.table import Table
from torchweft.pipeline.schedules.tracing import trace
from torchweft.pipeline.schedules.versions import versions_of


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
        return draw([Panel(each.title, each.spans) for each in every], unit)

    def trace(self) -> str:
        """Returns the timeline as trace events in JSON, which ui.perfetto.dev and Chrome show.

        Each worker is a track, and each action a slice with its stage, micro-batch and kind. Arrows
        lead from an action to those on other workers that wait for its results. A unit of time
        is shown as a second.
        """
        edges = chain(self.table.n_stages) if self.edges is None else self.edges
        return trace(self.title, self.spans, edges)


def _peak_activations(row: Sequence[Action]) -> int:
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    kept = accumulate((changes.get(action.kind, 0) for action in row), initial=0)
    return max(kept)
