"""Predicts when each action of a table runs, from the durations of actions and messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchweft.arguments import wrong_type
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules.actions import Action, Kind
from torchweft.pipeline.schedules.checks import check, checked_edges
from torchweft.pipeline.schedules.execution import Edges, run
from torchweft.pipeline.schedules.table import Table
from torchweft.pipeline.schedules.timeline import Timeline


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
