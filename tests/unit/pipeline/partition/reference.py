"""The cost model and the planner once more: loops over single stages, and over all plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from torchweft.pipeline.partition import Cluster, Profile

Stages = tuple[tuple[range, int], ...]
"""Layers and replicas of each stage."""


def layer_cuts(n_layers: int, n_stages: int) -> Iterator[tuple[range, ...]]:
    """All ways to cut layers into stages."""
    for cuts in itertools.combinations(range(1, n_layers), n_stages - 1):
        yield tuple(itertools.starmap(range, itertools.pairwise((0, *cuts, n_layers))))


def all_stages(n_layers: int, n_workers: int) -> Iterator[Stages]:
    """All ways to form stages with so many workers together."""
    for n_stages in range(1, min(n_layers, n_workers) + 1):
        for blocks in layer_cuts(n_layers, n_stages):
            for shares in layer_cuts(n_workers, n_stages):
                yield tuple(zip(blocks, map(len, shares), strict=True))


class Case(NamedTuple):
    """The arguments of ``plan``."""

    profile: Profile
    cluster: Cluster
    schedule: str
    n_microbatches: int


class CostModel(NamedTuple):
    """Seconds of a step, seconds of all transfers, and bytes of a worker of each stage."""

    step: float
    transfers: float
    memory: tuple[int, ...]


def costs_of(case: Case, stages: Stages) -> CostModel | None:
    """Returns what stages cost; None if they exceed the memory or a rule of the schedule."""
    worker, members = 0, []
    for _, replicas in stages:
        members.append(range(worker, worker + replicas))
        worker += replicas
    loads, transfers, memory = [], 0.0, []
    for number, (layers, replicas) in enumerate(stages):
        after = sum(others for _, others in stages[number:])
        in_flight = in_flight_of(case, after, replicas)
        if not is_allowed(case, replicas, in_flight):
            return None
        memory.append(memory_of(case, layers, in_flight))
        if memory[-1] > (
            math.inf if case.cluster.memory_bytes is None else case.cluster.memory_bytes
        ):
            return None
        loads.append(stage_load(case, layers, members[number]))
        if number + 1 < len(stages):
            link = link_seconds(case, layers.stop, members[number], members[number + 1])
            loads.append((case.n_microbatches - 1) * link if is_synchronous(case) else link)
            first = members[number][:1], members[number + 1][:1]
            transfers += link_seconds(case, layers.stop, *first)
    return CostModel(step_of(case, max(loads), transfers), transfers, tuple(memory))


def is_synchronous(case: Case) -> bool:
    return case.schedule in ("1f1b", "gpipe")


def is_allowed(case: Case, replicas: int, in_flight: int) -> bool:
    if is_synchronous(case):
        return replicas <= case.n_microbatches
    return True


def in_flight_of(case: Case, after: int, replicas: int) -> int:
    warm_up, own = math.ceil(after / replicas), math.ceil(case.n_microbatches / replicas)
    return {"gpipe": own, "1f1b": min(own, warm_up)}.get(case.schedule, warm_up)


def memory_of(case: Case, layers: range, in_flight: int) -> int:
    versions = {"pipedream-stashing": in_flight}.get(case.schedule, 1)
    total = 0
    for layer in (case.profile.layers[number] for number in layers):
        total += (versions + 1) * layer.weight_bytes + layer.fixed_bytes
        total += math.ceil(layer.weight_bytes * (layer.optimizer_ratio or 0))
        total += in_flight * layer.saved_bytes
    return total


def bandwidth_between(case: Case, one: int, other: int) -> float:
    per_host = case.cluster.workers_per_host
    if per_host is None or one // per_host == other // per_host:
        return case.cluster.bandwidth
    assert case.cluster.host_bandwidth is not None
    return case.cluster.host_bandwidth


def slowest_pair(case: Case, one: range, other: range) -> float:
    return min(bandwidth_between(case, a, b) for a in one for b in other)


def link_seconds(case: Case, first_layer: int, senders: range, receivers: range) -> float:
    activation_bytes = case.profile.layers[first_layer - 1].activation_bytes
    return 2 * activation_bytes / slowest_pair(case, senders, receivers)


def stage_load(case: Case, layers: range, members: range) -> float:
    profiles = [case.profile.layers[number] for number in layers]
    compute = sum(layer.forward_seconds + layer.backward_seconds for layer in profiles)
    weights = sum(layer.weight_bytes for layer in profiles)
    replicas = len(members)
    exchange = 2 * (replicas - 1) * weights / slowest_pair(case, members, members)
    if is_synchronous(case):
        return (math.ceil(case.n_microbatches / replicas) - 1) * compute + exchange
    shared_by = replicas if case.schedule == "pipedream-stashing" else case.n_microbatches
    return max(compute / replicas, exchange / shared_by)


def step_of(case: Case, largest: float, transfers: float) -> float:
    if not is_synchronous(case):
        return largest * case.n_microbatches
    compute = sum(layer.forward_seconds + layer.backward_seconds for layer in case.profile.layers)
    return compute + transfers + largest


def all_costs(case: Case) -> dict[Stages, CostModel]:
    """Returns what every possible plan costs."""
    n_workers = case.cluster.n_workers
    found = {}
    for stages in all_stages(len(case.profile.layers), n_workers):
        costs = costs_of(case, stages)
        if costs is not None:
            found[stages] = costs
    return found
