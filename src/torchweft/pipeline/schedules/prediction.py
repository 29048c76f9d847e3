"""Predicts how long a table takes, how long its workers are idle, and how much they must keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchweft.arguments import wrong_type
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules.actions import Action, Kind
from torchweft.pipeline.schedules.checks import check, checked_edges
from torchweft.pipeline.schedules.execution import Edges, Span, run
from torchweft.pipeline.schedules.picture import draw
from torchweft.pipeline.schedules.table import Table
from torchweft.pipeline.schedules.versions import versions_of


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


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action of a table runs, as predicted.

    Attributes:
        table: The table.
        spans: For each worker its actions with their start and end, in the order of its row.
    """

    table: Table
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """The end of the last action; the first one starts at 0."""
        return max((span.end_s for row in self.spans for span in row), default=0.0)

    @property
    def idle_share(self) -> float:
        """The share of the workers' time, up to the makespan, in which they are idle."""
        busy_s = sum(span.end_s - span.start_s for row in self.spans for span in row)
        capacity_s = len(self.spans) * self.makespan_s
        return 1 - busy_s / capacity_s if capacity_s else 0.0

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

    def svg(self) -> str:
        """Returns the timeline as a picture in SVG: a row for each worker, time from the left.

        The colour stands for the kind of an action, its shade for the micro-batch, which is also
        the label. Of several stages of a worker, the later ones are darker. The title of each box,
        which viewers show on hovering, has the action and its time; that of the picture has the
        idle share.
        """
        batches = "minibatches" if self.table.is_asynchronous else "micro-batches"
        title = (
            f"{self.table.name}: {self.table.n_workers} workers, {self.table.n_stages} stages, "
            f"{self.table.n_microbatches} {batches}, {100 * self.idle_share:.1f} % idle"
        )
        return draw(title, self.spans)


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
    ran = run(table.rows, checked_edges(table, edges), costs.of, costs.latency_s)
    return Timeline(table, ran.spans)


def _peak_activations(row: Sequence[Action]) -> int:
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    kept = accumulate((changes.get(action.kind, 0) for action in row), initial=0)
    return max(kept)
