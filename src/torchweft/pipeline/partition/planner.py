"""The planner: from a profile and a cluster to the fastest plan that fits its memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchweft.pipeline.errors import DoesNotFit, PartitionError
from torchweft.pipeline.partition.cluster import Cluster
from torchweft.pipeline.partition.costs import Array, Costs, Execution
from torchweft.pipeline.partition.plans import Plan, misfit, predicted
from torchweft.pipeline.partition.profiles import Profile
from torchweft.pipeline.partition.search import Found, Search


def plan(
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: str = "1f1b",
    n_microbatches: int | None = None,
    exchange: str = "central",
    may_idle: bool = False,
) -> Plan:
    """Returns the plan with the shortest predicted step that fits the memory of the workers.

    The search is exact for the cost model in ``costs`` (for a synchronous schedule within 0.1 %).
    Among plans of equal time, the one with the shortest transfers between its stages is taken.

    Args:
        profile: The model, measured with the size of one micro-batch.
        cluster: The workers. Stages take them in order; if some are left idle, these are the last
            ones where all workers are alike, and the first ones otherwise.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"pipedream-stashing"`` or ``"2bw"``.
        n_microbatches: Micro-batches of one step, over all replicas; needed except for
            ``"pipedream-stashing"``, where each minibatch is a step. For ``"2bw"``, a multiple of
            the number of workers allows every plan.
        exchange: How replicas exchange gradients: ``"central"`` at one of them, or ``"ring"``.
        may_idle: Whether workers may be left over where that makes the step shorter.

    Raises:
        DoesNotFit: If no plan fits the memory; names the layers, what they need and the limit.
        PartitionError: If an argument cannot be, or no plan keeps all workers busy.
    """
    costs = Costs(profile, cluster, Execution.checked(schedule, n_microbatches, exchange))
    search = _search(costs, may_idle, costs.fitting_loads)
    if costs.execution.is_synchronous:
        found = search.best_sum(sum(layer.compute_seconds for layer in profile.layers))
    else:
        found = search.best_load()
    if not found.stages:
        raise _why_no_plan(costs, may_idle)
    return _made(found, costs)


def _search(costs: Costs, may_idle: bool, loads: Callable[[range, int], Array]) -> Search:
    total = costs.cluster.n_workers
    allowed = [
        [r for r in range(n, 0, -1) if not costs.execution.refusal(n, r)] for n in range(total + 1)
    ]

    def workers(n_workers: int, replicas: int) -> range:
        return range(total - n_workers, total - n_workers + replicas)

    return Search(
        costs.n_layers,
        total,
        loads=lambda n, replicas: loads(workers(n, replicas), n),
        tolls=lambda n, replicas: costs.transfers(workers(n, replicas)),
        replicas=allowed.__getitem__,
        may_idle=may_idle,
    )


def _made(found: Found, costs: Costs) -> Plan:
    used = sum(replicas for _, replicas in found.stages)
    # Alike workers: a user expects the first ones to be busy.
    first = 0 if costs.cluster.is_uniform else costs.cluster.n_workers - used
    return predicted(found.stages, costs, first)


def _why_no_plan(costs: Costs, may_idle: bool) -> PartitionError:
    """Explains why there is no plan: by a layer that is too large alone, or by the closest plan."""
    closest = _search(costs, may_idle, costs.excesses).best_load()
    if not closest.stages:
        n_workers, execution = costs.cluster.n_workers, costs.execution
        enough = math.ceil(execution.n_microbatches / n_workers) * n_workers
        return PartitionError(
            f"no plan for {costs.n_layers} layers keeps {n_workers} workers busy in "
            f"{execution.schedule} with n_microbatches={execution.n_microbatches}: pass "
            f"n_microbatches={enough}, or may_idle=True"
        )
    made = _made(closest, costs)
    prefix = f"no plan fits the workers' memory; in the closest one, {made.shape}, "
    error = _too_large_layer(costs) or made.find_misfit(prefix)
    assert error is not None
    return error


def _too_large_layer(costs: Costs) -> DoesNotFit | None:
    cluster, execution = costs.cluster, costs.execution
    limit = max(cluster.limit(range(n, n + 1)) for n in range(cluster.n_workers))
    # The most replicas hold the fewest micro-batches in flight.
    most = max(r for r in range(1, cluster.n_workers + 1) if not execution.refusal(r, r))
    for number, layer in enumerate(costs.profile.layers):
        alone = range(number, number + 1)
        cost = costs.stage(alone, range(most), most)
        if cost.memory_bytes > limit:
            is_state = cost.memory_bytes - cost.activation_bytes > limit
            subject = f"{'the weights of ' if is_state else ''}layer {number} ({layer.name})"
            verb = "do not" if is_state else "does not"
            return misfit(f"{subject} {verb} fit a worker", alone, cost, int(limit))
    return None
