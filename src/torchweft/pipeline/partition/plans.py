"""A plan: which layers form which stage, on which workers, and what that is predicted to cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchweft.pipeline.errors import DoesNotFit, PartitionError
from torchweft.pipeline.partition.costs import (
    Cluster,
    CostModel,
    Execution,
    Profile,
    StageCost,
    aligned,
    bytes_text,
    layers_text,
    seconds_text,
    span_text,
)

_HEADER = (
    "stage,layers,workers,compute,exchange,transfer,load,limited by,in flight,versions,memory,limit"
).split(",")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        layers: Indices of its layers.
        workers: Indices of its workers, in the order of micro-batches.
        names: Names of its layers; empty if the plan was made without a profile.
        cost: Predicted costs; None if the plan was made without a profile.
    """

    layers: range
    workers: range
    names: tuple[str, ...] = ()
    cost: StageCost | None = None

    @property
    def replicas(self) -> int:
        """Number of workers that hold the stage."""
        return len(self.workers)


@dataclass(frozen=True, slots=True)
class Plan:
    """A cut of a model into stages, and of the workers among them.

    Attributes:
        stages: The stages in order; together they have every layer once.
        n_workers: Number of workers of the cluster; those in no stage are idle.
        schedule: ScheduleName that the predictions are for.
        n_microbatches: Micro-batches of a step; None if not known.
        microbatch_size: Samples of a micro-batch; None for a plan without a profile.
        step_seconds: Predicted time of a step, which is one minibatch for ``pipedream-stashing``;
            None for a plan without a profile.
    """

    stages: tuple[StagePlan, ...]
    n_workers: int
    schedule: str
    n_microbatches: int | None = None
    microbatch_size: int | None = None
    step_seconds: float | None = None

    @classmethod
    def manual(
        cls,
        cuts: Sequence[int],
        replicas: Sequence[int] | None = None,
        profile: Profile | None = None,
        cluster: Cluster | None = None,
        *,
        n_layers: int | None = None,
        schedule: str = "1f1b",
        n_microbatches: int | None = None,
    ) -> Plan:
        """Returns a plan with stages that the caller chose.

        Args:
            cuts: Index of the first layer of each stage except the first: ``[3, 5]`` makes stages
                0-2, 3-4 and 5 to the last layer. The result of ``balance`` is one.
            replicas: Number of workers of each stage; by default one each.
            profile: Profile to predict costs from; without it, nothing is predicted.
            cluster: Workers to predict costs for; by default as many as needed, without a memory
                limit, with links that cost nothing.
            n_layers: Number of layers, where there is no profile.
            schedule: ScheduleName that the plan is for, as in ``plan``.
            n_microbatches: Micro-batches of a step, as in ``plan``; needed with a profile.

        Raises:
            PartitionError: If cuts or replicas cannot be; says which and why.
            DoesNotFit: If a stage needs more memory than its workers have.
        """
        n_layers = _count_layers(profile, n_layers)
        blocks = _blocks(cuts, n_layers)
        counts = _checked_replicas(replicas, blocks, cluster)
        cluster = cluster or Cluster(sum(counts), math.inf)
        if profile is not None:
            execution = Execution.checked(schedule, n_microbatches)
            costs = CostModel(profile, cluster, execution)
            made = predicted(list(zip(blocks, counts, strict=True)), costs)
            if error := made.find_misfit():
                raise error
            return made
        stages, worker = [], 0
        for layers, count in zip(blocks, counts, strict=True):
            stages.append(StagePlan(layers, range(worker, worker + count)))
            worker += count
        return cls(tuple(stages), cluster.n_workers, schedule, n_microbatches)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first layer of each stage except the first."""
        return tuple(stage.layers.start for stage in self.stages[1:])

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of workers of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def shape(self) -> str:
        """The replicas of the stages as text, such as ``"3-1"``."""
        return "-".join(map(str, self.replicas))

    @property
    def n_layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1].layers.stop

    @property
    def slowest(self) -> int | None:
        """Number of the stage with the largest load; None for a plan without a profile."""
        loads = [stage.cost.load_seconds for stage in self.stages if stage.cost]
        return loads.index(max(loads)) if loads else None

    @property
    def utilisation(self) -> float | None:
        """Share of the time of all used workers that is spent computing, as predicted."""
        if not self.step_seconds:
            return None
        compute = sum(stage.cost.compute_seconds for stage in self.stages if stage.cost)
        used = sum(self.replicas)
        return compute * (self.n_microbatches or 1) / (used * self.step_seconds)

    def find_misfit(self, prefix: str = "") -> DoesNotFit | None:
        """Returns an error for the stage that exceeds its workers' memory most, None if all fit."""
        excess, worst = 0, None
        for number, stage in enumerate(self.stages):
            if stage.cost is None or stage.cost.limit_bytes is None:
                continue
            over = stage.cost.memory_bytes - stage.cost.limit_bytes
            if over > excess:
                subject = f"stage {number} (layers {layers_text(stage.layers, stage.names)})"
                text = f"{prefix}{subject} does not fit a worker"
                excess, worst = over, misfit(text, stage.layers, stage.cost, stage.cost.limit_bytes)
        return worst

    def table(self) -> str:
        """Returns an aligned table: the time of each stage, and the memory of each worker."""
        rows = []
        for number, stage in enumerate(self.stages):
            row = [str(number), layers_text(stage.layers, stage.names), span_text(stage.workers)]
            rows.append(row if stage.cost is None else [*row, *stage.cost.cells])
        return aligned(_HEADER[: len(rows[0])], rows, left=["layers", "workers", "limited by"])

    def __str__(self) -> str:
        return f"{self._head()}\n\n{self.table()}"

    def _head(self) -> str:
        used = sum(self.replicas)
        workers = f"{used} of {self.n_workers}" if used < self.n_workers else f"{used}"
        stages = "1 stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        lines = [f"Plan {self.shape}: {self.n_layers} layers as {stages} on {workers} workers"]
        if self.slowest is None or self.step_seconds is None:
            return lines[0]
        cost = self.stages[self.slowest].cost
        batch = "minibatch" if self.schedule == "pipedream-stashing" else "micro-batch"
        count = "1" if self.n_microbatches is None else str(self.n_microbatches)
        lines.append(
            f"{self.schedule}, a step is {count} {batch}{'' if count == '1' else 'es'} "
            f"of {self.microbatch_size}: {seconds_text(self.step_seconds)}"
        )
        share = f"; workers compute {self.utilisation:.0%} of the time" if self.utilisation else ""
        lines.append(
            f"limited by the {cost.limited_by if cost else ''} of stage {self.slowest}{share}"
        )
        lines.append(
            "load: time between two micro-batches, if the stage were the slowest"
            if self.schedule == "pipedream-stashing"
            else "load: time of a step beyond its first micro-batch, if the stage were the slowest"
        )
        return "\n".join(lines)


def predicted(stages: Sequence[tuple[range, int]], costs: CostModel) -> Plan:
    """Returns the plan with these layers and replicas, with its costs."""
    made, worker = [], 0
    last_worker = sum(replicas for _, replicas in stages)
    for layers, replicas in stages:
        workers = range(worker, worker + replicas)
        names = tuple(layer.name for layer in costs.profile.layers[layers.start : layers.stop])
        cost = costs.stage(layers, workers, last_worker - worker)
        made.append((StagePlan(layers, workers, names, cost), cost))
        worker += replicas
    step_seconds = costs.execution.step_seconds(
        max(cost.load_seconds for _, cost in made),
        sum(cost.compute_seconds for _, cost in made),
        sum(cost.transfer_seconds for _, cost in made),
    )
    return Plan(
        tuple(stage for stage, _ in made),
        costs.cluster.n_workers,
        costs.execution.schedule,
        costs.execution.n_microbatches,
        costs.profile.batch_size,
        step_seconds,
    )


def misfit(text: str, layers: range, cost: StageCost, limit_bytes: int) -> DoesNotFit:
    """Returns the error for layers that need more memory than a limit; ``text`` names them."""
    parts = (
        (f"weights × {cost.versions}" if cost.versions > 1 else "weights", cost.weight_bytes),
        ("gradients", cost.gradient_bytes),
        ("optimizer state", cost.optimizer_bytes),
        (f"activations × {cost.in_flight}", cost.activation_bytes),
    )
    listed = " + ".join(f"{bytes_text(size)} {name}" for name, size in parts if size)
    return DoesNotFit(
        f"{text}: {bytes_text(cost.memory_bytes)} needed ({listed}), "
        f"and the limit is {bytes_text(limit_bytes)}",
        first_layer=layers[0],
        last_layer=layers[-1],
        needed_bytes=cost.memory_bytes,
        limit_bytes=limit_bytes,
    )


def _count_layers(profile: Profile | None, n_layers: int | None) -> int:
    if profile is None and n_layers is None:
        raise PartitionError(
            "neither a profile nor n_layers is given, so the last layer is unknown"
        )
    if profile is not None and n_layers not in (None, len(profile.layers)):
        raise PartitionError(
            f"n_layers={n_layers}, but the profile has {len(profile.layers)} layers"
        )
    count = n_layers if profile is None else len(profile.layers)
    if not count or count < 1:
        raise PartitionError(f"n_layers={n_layers}: a model needs at least one layer")
    return count


def _blocks(cuts: Sequence[int], n_layers: int) -> list[range]:
    bounds = [0, *cuts, n_layers]
    for number, (first, stop) in enumerate(pairwise(bounds)):
        if number < len(cuts) and not 0 < stop < n_layers:
            raise PartitionError(
                f"cut {number} is {stop}; the first layer of stage {number + 1} must be from 1 to "
                f"{n_layers - 1}, as there are {n_layers} layers"
            )
        if first >= stop:
            raise PartitionError(
                f"stage {number} would have the layers from {first} to before {stop}; cuts must "
                f"rise, but are {list(cuts)}"
            )
    return [range(first, stop) for first, stop in pairwise(bounds)]


def _checked_replicas(
    replicas: Sequence[int] | None, blocks: list[range], cluster: Cluster | None
) -> list[int]:
    counts = [1] * len(blocks) if replicas is None else list(replicas)
    if len(counts) != len(blocks):
        raise PartitionError(
            f"replicas has {len(counts)} numbers, but the {len(blocks) - 1} cuts make "
            f"{len(blocks)} stages; give one number for each stage"
        )
    for number, count in enumerate(counts):
        if count < 1:
            raise PartitionError(f"stage {number} has {count} replicas; it needs at least one")
    if cluster is not None and sum(counts) > cluster.n_workers:
        raise PartitionError(
            f"replicas {counts} add up to {sum(counts)} workers, but the cluster has "
            f"{cluster.n_workers}"
        )
    return counts
