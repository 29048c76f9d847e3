"""Tests the search for the best cut, the planner, and even cuts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import THOROUGH, share
from tests.unit.pipeline.partition.reference import (
    Case,
    Stages,
    all_costs,
    all_stages,
    costs_of,
    layer_cuts,
)
from torchweft.pipeline.partition import (
    Cluster,
    DoesNotFit,
    LayerProfile,
    PartitionError,
    Plan,
    Profile,
    balance,
    plan,
)
from torchweft.pipeline.partition.costs import Array
from torchweft.pipeline.partition.search import STEP_PRECISION, Search


class Problem(NamedTuple):
    """Loads and tolls that nothing but the search has in common with a model."""

    n_layers: int
    n_workers: int
    load_of: Array  # by workers from the stage on, replicas, first layer, layer after the last one
    toll_of: Array  # by workers from the stage on, replicas, layer after the last one

    def search(self) -> Search:
        return Search(
            self.n_layers,
            self.n_workers,
            lambda n_workers, replicas: self.load_of[n_workers, replicas],
            lambda n_workers, replicas: self.toll_of[n_workers, replicas],
            lambda n_workers: range(n_workers, 0, -1),
        )

    def value(self, stages: Stages) -> tuple[float, float]:
        """Returns the largest load and the sum of tolls."""
        left = sum(replicas for _, replicas in stages)
        loads, tolls = [], []
        for layers, replicas in stages:
            loads.append(float(self.load_of[left, replicas, layers.start, layers.stop]))
            tolls.append(float(self.toll_of[left, replicas, layers.stop]))
            left -= replicas
        return max(loads), sum(tolls)

    def all_values(self) -> list[tuple[float, float]]:
        values = [self.value(stages) for stages in all_stages(self.n_layers, self.n_workers)]
        return [value for value in values if value[0] < math.inf]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n_layers, n_workers = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest, share_of_none = draw(st.sampled_from([(4, 0.0), (1000, 0.0), (1000, 0.4)]))
    shape = (n_workers + 1, n_workers + 1, n_layers + 1, n_layers + 1)
    loads = random.integers(0, largest, shape).astype(float)
    loads[random.random(shape) < share_of_none] = math.inf
    loads[..., np.tri(n_layers + 1, dtype=bool)] = math.inf
    tolls = random.integers(0, draw(st.sampled_from([2, 300, 3000])), shape[:3]).astype(float)
    return Problem(n_layers, n_workers, loads, tolls)


@given(problems())
@settings(max_examples=share(1500))
def test_no_pipeline_is_better(problem: Problem) -> None:
    values, search = problem.all_values(), problem.search()
    if not values:
        assert search.smallest_load() == math.inf
        assert search.best_load() == search.best_sum(0) == ((), math.inf, math.inf)
        return
    assert search.smallest_load() == min(values)[0]
    for found, best in [
        (search.best_load(), min(values)),
        (search.cheapest(), (None, min(tolls for _, tolls in values))),
        (search.best_sum(0), None),
    ]:
        assert problem.value(found.stages) == (found.largest, found.tolls)
        if best is not None:
            assert found.tolls == best[1]
            assert best[0] in (found.largest, None)
    least = min(sum(value) for value in values)
    assert least <= found.largest + found.tolls <= least / (1 - STEP_PRECISION)


# Tests the planner against all plans, and the choices that it must make.


KINDS = ["pipedream-stashing", "1f1b", "gpipe"]
MIB = 2**20


def layer(
    seconds: float, weights: int, output: int = 0, saved: int = 0, name: str = "layer"
) -> LayerProfile:
    return LayerProfile(name, seconds / 3, seconds * 2 / 3, output, saved, weights)


def profile_of(*layers: LayerProfile) -> Profile:
    return Profile(layers, batch_size=1)


def even(n_layers: int, weights: int, output: int) -> Profile:
    return profile_of(*[layer(0.03, weights, output, saved=8 * MIB)] * n_layers)


def convolutions_then_linear() -> Profile:
    front = [layer(0.03, MIB // 4, 2 * MIB, 8 * MIB, f"conv{n}") for n in range(1, 7)]
    tail = [
        layer(0.005, 400 * MIB, 16384, MIB, "fc6"),
        layer(0.002, 64 * MIB, 16384, MIB, "fc7"),
        layer(0.001, 16 * MIB, 4000, MIB, "fc8"),
    ]
    return profile_of(*front, *tail)


def planned(profile: Profile, kind: str, **options: Any) -> Plan:
    cluster = options.pop("cluster", Cluster(4, bandwidth=1e9))
    if kind != "pipedream-stashing":
        options.setdefault("n_microbatches", 12)
    return plan(profile, cluster, schedule=kind, **options)


# Every plan of small models


@st.composite
def cases(draw: st.DrawFn) -> Case:
    number = st.integers(0, 12)
    layers = draw(
        st.lists(
            st.builds(
                LayerProfile,
                name=st.just("layer"),
                forward_seconds=number,
                backward_seconds=number,
                activation_bytes=number,
                saved_bytes=number,
                weight_bytes=number,
                fixed_bytes=st.integers(0, 3),
                optimizer_ratio=st.sampled_from([None, 0.5, 2.0]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    n_workers = draw(st.integers(1, 5))
    limit = st.integers(10, 200)
    bandwidth = draw(st.sampled_from([0.5, 1.0, 4.0, float("inf")]))
    has_hosts = draw(st.booleans())
    cluster = Cluster(
        n_workers,
        bandwidth,
        draw(st.none() | limit),
        workers_per_host=draw(st.integers(1, 3)) if has_hosts else None,
        host_bandwidth=draw(st.sampled_from([0.25, 0.5])) if has_hosts else None,
    )
    kind = draw(st.sampled_from(KINDS))
    return Case(
        Profile(tuple(layers), batch_size=1),
        cluster,
        kind,
        1 if kind == "pipedream-stashing" else draw(st.integers(1, 8)),
    )


@given(cases())
@settings(max_examples=share(1200))
def test_no_plan_is_faster(case: Case) -> None:
    possible = all_costs(case)
    if not possible:
        with pytest.raises(PartitionError) as raised:
            plan_of(case)
        unlimited = case._replace(cluster=without_limit(case.cluster))
        assert isinstance(raised.value, DoesNotFit) == bool(all_costs(unlimited))
        return
    made = plan_of(case)
    found = possible[tuple((stage.layers, stage.replicas) for stage in made.stages)]
    fastest = min(costs.step for costs in possible.values())
    if case.schedule in ("1f1b", "gpipe"):
        assert found.step <= fastest * (1 + STEP_PRECISION) + 1e-9
    else:
        assert found.step == pytest.approx(fastest)
        equal = [costs for costs in possible.values() if costs.step <= fastest * (1 + 1e-12)]
        assert found.transfers == pytest.approx(min(costs.transfers for costs in equal))
    check_predictions(case, made)


def plan_of(case: Case) -> Plan:
    profile, cluster, kind, n_microbatches = case
    return plan(
        profile,
        cluster,
        schedule=kind,
        n_microbatches=n_microbatches,
    )


def without_limit(cluster: Cluster) -> Cluster:
    return Cluster(
        cluster.n_workers,
        cluster.bandwidth,
        None,
        cluster.workers_per_host,
        cluster.host_bandwidth,
    )


def check_predictions(case: Case, made: Plan) -> None:
    stages = tuple((stage.layers, stage.replicas) for stage in made.stages)
    expected = costs_of(case, stages)
    assert expected is not None
    assert made.step_seconds == pytest.approx(expected.step)
    costs = [stage.cost for stage in made.stages if stage.cost]
    assert tuple(cost.memory_bytes for cost in costs) == expected.memory
    assert sum(cost.transfer_seconds for cost in costs) == pytest.approx(expected.transfers)


# Memory


def test_where_the_fastest_plan_does_not_fit_the_next_best_is_taken() -> None:
    profile = even(8, weights=MIB, output=MIB)  # 8 MiB saved in each layer
    assert planned(profile, "1f1b").shape == "4"
    cluster = Cluster(4, 1e9, 70 * MIB)
    made = planned(profile, "1f1b", cluster=cluster)
    costs = [stage.cost for stage in made.stages if stage.cost]
    assert made.shape == "1-3"
    assert [cost.in_flight for cost in costs] == [4, 1]
    assert [cost.memory_bytes for cost in costs] == [(4 * 8 + 2) * MIB, (56 + 14) * MIB]
    # All activations of a step at once are too much, wherever the cuts are.
    with pytest.raises(DoesNotFit):
        planned(profile, "gpipe", cluster=cluster)


def test_layers_whose_weights_do_not_fit_a_worker_are_named() -> None:
    cluster = Cluster(4, 1e9, 512 * MIB)
    with pytest.raises(DoesNotFit, match=r"no plan fits .* fc6") as e:
        planned(convolutions_then_linear(), "1f1b", cluster=cluster)
    error = e.value
    assert error.first_layer <= 6 <= error.last_layer
    assert error.limit_bytes == 512 * MIB < 800 * MIB < error.needed_bytes
    assert str(error).endswith("and the limit is 512 MiB")


def test_where_layers_fit_alone_but_not_together_the_closest_plan_is_named() -> None:
    profile = profile_of(*[layer(1, 100, name=f"l{n}") for n in range(3)])
    message = "no plan fits the workers' memory; in the closest one, 1-1, stage [01] \\(layers "
    with pytest.raises(DoesNotFit, match=message) as e:
        planned(profile, "1f1b", cluster=Cluster(2, 1e9, 399))
    assert (e.value.needed_bytes, e.value.limit_bytes) == (400, 399)
    assert e.value.last_layer == e.value.first_layer + 1


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "2f2b"}, "schedule '2f2b' is none of 1f1b, gpipe, pipedream-stashing"),
        ({"n_microbatches": None}, "'1f1b' needs n_microbatches"),
        ({"n_microbatches": 0}, "n_microbatches=0 must be 1 or more"),
        ({"schedule": "pipedream-stashing"}, "n_microbatches=4, but each minibatch is a step"),
        ({"n_microbatches": 1}, "no plan for 2 layers keeps 4 workers busy in 1f1b .*=4, or a"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message) as raised:
        plan(even(2, 1, 1), Cluster(4, 1e9), **{"n_microbatches": 4, **options})
    assert not isinstance(raised.value, DoesNotFit)


# Effort


def test_a_large_model_on_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    n_layers, n_workers = (200, 64) if THOROUGH else (100, 24)
    profile = profile_of(
        *[layer(1 + n * 7 % 11, (n * 5 % 13) * MIB, n * 3 % 7 * MIB, MIB) for n in range(n_layers)]
    )
    passes = []
    cheapest = Search.cheapest
    monkeypatch.setattr(Search, "cheapest", lambda *a: passes.append(a) or cheapest(*a))
    cluster = Cluster(n_workers, 1e7, 400 * MIB)
    made = plan(profile, cluster, n_microbatches=64)
    assert sum(stage.replicas for stage in made.stages) == n_workers
    assert 2 <= len(passes) <= 30


# Tests balanced cuts against all cuts.


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
@settings(max_examples=share(800))
def test_no_cut_is_better(weights: list[int], data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, len(weights)))

    def quality(blocks: tuple[range, ...]) -> tuple[int, int]:
        sums = [sum(weights[number] for number in block) for block in blocks]
        return max(sums), sum(value * value for value in sums)

    made = Plan.manual(balance(weights, n_stages), n_layers=len(weights))
    assert len(made.stages) == n_stages
    best = min(map(quality, layer_cuts(len(weights), n_stages)))
    assert quality(tuple(stage.layers for stage in made.stages)) == best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "no layers"),
        (([1, 2], 3), "2 layers cannot form 3 stages; pass n_stages from 1 to 2"),
        (([1, 2], 0), "2 layers cannot form 0 stages"),
        (([1, -2], 1), "layer 1 has weight -2; it must be 0 or more"),
        (([1, float("nan")], 1), "layer 1 has weight nan"),
    ],
)
def test_mistakes_are_named_of_balancing(arguments: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        balance(*arguments)


def test_many_layers() -> None:
    assert len(balance([number % 7 for number in range(300)], 40)) == 39
