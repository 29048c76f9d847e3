"""Finds the best cut of a chain of layers into stages by dynamic programming.

The recurrence is that of PipeDream (see ``costs``), taken from the end of the model: A(k, m), the
largest load of the best pipeline of layers k.. on m workers, is the minimum over the end j and the
replicas r of the first stage of max(load(k, j, r), A(j, m - r)). The end has a reason: m tells how
many workers follow, and so how many micro-batches the stage holds in flight, and which workers it
has. So the memory of a stage and the hosts that it spans depend on nothing but (k, j, r, m).

Largest loads have many ties, since most stages are not the slowest. So a second pass of the same
shape finds, among the pipelines with no load above a bound, the one with the smallest sum of tolls,
such as the transfers between its stages. ``best_sum`` moves that bound to minimise largest load
plus tolls, which is the time of a synchronous step.

A pass takes O(n² w²) operations for n layers and w workers, of which numpy does n² at a time.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchweft.pipeline.errors import PartitionError
from torchweft.pipeline.partition.costs import Array, Cluster, CostModel, Execution, Profile
from torchweft.pipeline.partition.plans import Plan, predicted

PRECISION = 1e-9
"""Loads that differ by less, relatively, count as equal: sums of floats differ by rounding."""
STEP_PRECISION = 1e-3
"""``best_sum`` may miss the best sum by this, relatively; measurements are far less exact."""

Matrix: TypeAlias = Callable[[int, int], Array]
"""Values for a first stage with (workers in it and after it, replicas): rows for its first layer,
columns for the first layer after it, or columns alone."""


class Candidate(NamedTuple):
    """A pipeline.

    Attributes:
        stages: Layers and replicas of each stage.
        largest: The largest load, or infinite if there is no such pipeline.
        tolls: The sum of the tolls.
    """

    stages: tuple[tuple[range, int], ...]
    largest: float
    tolls: float


class Search:
    """The search over one matrix of loads and one of tolls.

    Args:
        n_layers: Number of layers.
        n_workers: Number of workers.
        loads: Load of a stage, infinite where it is not possible.
        tolls: What a stage adds to the sum that decides between equal loads.
        replicas: Numbers of replicas that a first stage may have, by the number of workers in it
            and after it; most first, so that of equal pipelines the one with fewer stages is found.
    """

    def __init__(
        self,
        n_layers: int,
        n_workers: int,
        loads: Matrix,
        tolls: Matrix,
        replicas: Callable[[int], Iterable[int]],
    ) -> None:
        self._n_layers = n_layers
        self._n_workers = n_workers
        self._loads = loads
        self._tolls = tolls
        self._replicas = replicas

    def smallest_load(self) -> float:
        """Returns the largest load of the pipeline that has the smallest, infinite for none."""
        best = [self._end()]
        for n_workers in range(1, self._n_workers + 1):
            row = np.full(self._n_layers + 1, math.inf)
            for replicas in self._replicas(n_workers):
                rest = best[n_workers - replicas]
                loads = np.maximum(self._loads(n_workers, replicas), rest)
                np.minimum(row, loads.min(axis=1), out=row)
            best.append(row)
        return float(best[-1][0])

    def cheapest(self, bound: float = math.inf) -> Candidate:
        """Returns the pipeline with the smallest sum of tolls that has no load above ``bound``."""
        bound = min(bound, sys.float_info.max)  # an infinite load is never one of them
        best = [self._end()]
        choices = [np.zeros((2, self._n_layers + 1), int)]
        for n_workers in range(1, self._n_workers + 1):
            row = np.full(self._n_layers + 1, math.inf)
            choice = np.zeros((2, len(row)), int)
            for replicas in self._replicas(n_workers):
                sums = self._tolls(n_workers, replicas) + best[n_workers - replicas]
                sums = np.where(self._loads(n_workers, replicas) <= bound, sums, math.inf)
                # Of equal sums the one with the longest stage, which leads to fewer stages.
                at = self._n_layers - sums[:, ::-1].argmin(axis=1)
                smallest = np.take_along_axis(sums, at[:, None], axis=1)[:, 0]
                better = smallest < row
                row[better] = smallest[better]
                choice[0, better], choice[1, better] = at[better], replicas
            best.append(row)
            choices.append(choice)
        if best[-1][0] == math.inf:
            return Candidate((), math.inf, math.inf)
        return self._trace(self._n_workers, float(best[-1][0]), choices)

    def best_load(self) -> Candidate:
        """Returns the pipeline with the smallest largest load; ties go to the smallest tolls."""
        return self.cheapest(self.smallest_load() * (1 + PRECISION))

    def best_sum(self, added: float) -> Candidate:
        """Returns the pipeline with the smallest sum of largest load and tolls.

        The smallest sum of tolls for a bound, t(bound), falls as the bound rises. In an interval
        of bounds the sum is at least its lower end plus t(its upper end). The interval with the
        smallest such value is halved, until none can hold a better pipeline.

        Args:
            added: A constant part of the sum, to which the precision also refers.
        """
        low, high = self.best_load(), self.cheapest()
        if low.largest == math.inf:
            return low
        best = min(low, high, key=_sum)
        intervals = [(low.largest + high.tolls, low.largest, high.largest, high.tolls)]
        while intervals:
            least, start, stop, stop_tolls = heapq.heappop(intervals)
            if added + least >= (added + _sum(best)) * (1 - STEP_PRECISION):
                break
            middle = (start + stop) / 2
            found = self.cheapest(middle)
            best = min(best, found, key=_sum)
            heapq.heappush(intervals, (middle + stop_tolls, middle, stop, stop_tolls))
            if found.largest > start:
                lower = start + found.tolls, start, found.largest, found.tolls
                heapq.heappush(intervals, lower)
        return best

    def _end(self) -> Array:
        """Returns the row for no workers: nothing may be left of the model."""
        row = np.full(self._n_layers + 1, math.inf)
        row[-1] = 0
        return row

    def _trace(self, n_workers: int, tolls: float, choices: list[NDArray[np.int_]]) -> Candidate:
        stages, largest, first = [], 0.0, 0
        while n_workers:
            end, replicas = (int(value) for value in choices[n_workers][:, first])
            largest = max(largest, float(self._loads(n_workers, replicas)[first, end]))
            stages.append((range(first, end), replicas))
            first, n_workers = end, n_workers - replicas
        return Candidate(tuple(stages), largest, tolls)


def _sum(found: Candidate) -> float:
    return found.largest + found.tolls


# The planner


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
) -> Plan:
    """Returns the plan with the shortest predicted step that fits the memory of the workers.

    The search is exact for the cost model in ``costs`` (for a synchronous schedule within 0.1 %).
    Among plans of equal time, the one with the shortest transfers between its stages is taken.

    Args:
        profile: The model, measured with the size of one micro-batch.
        cluster: The workers. Stages take them in order, and all of them.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"pipedream-stashing"``.
        n_microbatches: Micro-batches of one step, over all replicas; needed except for
            ``"pipedream-stashing"``, where each minibatch is a step.

    Raises:
        DoesNotFit: If no plan fits the memory; names the layers, what they need and the limit.
        PartitionError: If an argument cannot be, or no plan keeps all workers busy.
    """
    costs = CostModel(profile, cluster, Execution.checked(schedule, n_microbatches))
    search = _search(costs, costs.fitting_loads)
    if costs.execution.is_synchronous:
        found = search.best_sum(sum(layer.compute_seconds for layer in profile.layers))
    else:
        found = search.best_load()
    if not found.stages:
        raise _why_no_plan(costs)
    return predicted(found.stages, costs)


def _search(costs: CostModel, loads: Callable[[range, int], Array]) -> Search:
    total = costs.cluster.n_workers
    allowed = [
        [r for r in range(n, 0, -1) if not costs.execution.refusal(r)] for n in range(total + 1)
    ]

    def workers(n_workers: int, replicas: int) -> range:
        return range(total - n_workers, total - n_workers + replicas)

    return Search(
        costs.n_layers,
        total,
        loads=lambda n, replicas: loads(workers(n, replicas), n),
        tolls=lambda n, replicas: costs.transfers(workers(n, replicas)),
        replicas=allowed.__getitem__,
    )


def _why_no_plan(costs: CostModel) -> PartitionError:
    """Explains why there is no plan by the one whose memory exceeds the limit least."""
    closest = _search(costs, costs.excesses).best_load()
    if not closest.stages:
        n_workers, execution = costs.cluster.n_workers, costs.execution
        enough = math.ceil(execution.n_microbatches / n_workers) * n_workers
        return PartitionError(
            f"no plan for {costs.n_layers} layers keeps {n_workers} workers busy in "
            f"{execution.schedule} with n_microbatches={execution.n_microbatches}: pass "
            f"n_microbatches={enough}, or a cluster of fewer workers"
        )
    made = predicted(closest.stages, costs)
    error = made.find_misfit(
        f"no plan fits the workers' memory; in the closest one, {made.shape}, "
    )
    assert error is not None
    return error


def balance(weights: Profile | Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Returns the cuts into stages whose largest weight is as small as can be.

    Exact; among such cuts, the one with the most even stages (smallest sum of squares) is taken.

    Args:
        weights: A weight for each layer, 0 or more; or a profile, of whose layers the times count.
        n_stages: Number of stages.

    Returns:
        Index of the first layer of each stage except the first, as ``Plan.manual`` takes it.

    Raises:
        PartitionError: If there are fewer layers than stages, or a weight is negative.
    """
    if isinstance(weights, Profile):
        weights = [layer.compute_seconds for layer in weights.layers]
    values = list(weights)
    n_layers = len(values)
    if not n_layers:
        raise PartitionError("there are no layers to balance; give at least one weight")
    if not 1 <= n_stages <= n_layers:
        raise PartitionError(
            f"{n_layers} layers cannot form {n_stages} stages; pass n_stages from 1 to {n_layers}"
        )
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise PartitionError(f"layer {number} has weight {value}; it must be 0 or more")
    totals = np.cumsum([0, *values], dtype=float)
    blocks = totals[None, :] - totals[:, None]
    blocks[np.tri(n_layers + 1, dtype=bool)] = math.inf
    squares = (blocks / (totals[-1] or 1)) ** 2
    search = Search(n_layers, n_stages, lambda *_: blocks, lambda *_: squares, lambda _: [1])
    return tuple(layers.start for layers, _ in search.best_load().stages[1:])
