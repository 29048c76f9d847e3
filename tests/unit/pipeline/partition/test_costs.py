"""Tests the predicted time of a synchronous step against schedules that are played through."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from torchweft.pipeline.partition import Cluster, LayerProfile, Plan, Profile


def played_through(kind: str, forward: list[float], backward: list[float], count: int) -> float:
    """Returns the time of a step of stages with one worker each, and links that cost nothing."""
    n_stages = len(forward)
    orders = []
    for stage in range(n_stages):
        warm_up = count if kind == "gpipe" else min(count, n_stages - stage)
        order = [("F", number) for number in range(warm_up)]
        for number in range(count):
            order.append(("B", number))
            order += [("F", number + warm_up)] if number + warm_up < count else []
        orders.append(order)
    free_at = [0.0] * n_stages
    done = {("F", -1, number): 0.0 for number in range(count)}
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                action, number = order[0]
                needed = ("F", stage - 1, number) if action == "F" else ("B", stage + 1, number)
                if needed[:2] == ("B", n_stages):
                    needed = ("F", stage, number)
                if needed not in done:
                    break
                seconds = forward[stage] if action == "F" else backward[stage]
                free_at[stage] = max(free_at[stage], done[needed]) + seconds
                done[action, stage, number] = free_at[stage]
                order.pop(0)
    return max(free_at)


def predicted(kind: str, forward: Iterable[float], backward: Iterable[float], count: int) -> float:
    layers = [LayerProfile("layer", f, b, 0, 0, 0) for f, b in zip(forward, backward, strict=True)]
    made = Plan.manual(
        range(1, len(layers)), None, Profile(tuple(layers), 1), schedule=kind, n_microbatches=count
    )
    assert made.step_seconds is not None
    return made.step_seconds


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_a_step_of_even_stages_is_predicted_exactly(kind: str, count: int, n_stages: int) -> None:
    forward, backward = [1.0] * n_stages, [2.0] * n_stages
    step = played_through(kind, forward, backward, count)
    assert step == 3 * (count + n_stages - 1)  # the same from the literature
    assert predicted(kind, forward, backward, count) == pytest.approx(step)


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=5),
    st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    st.integers(1, 9),
)
@settings(max_examples=share(600))
def test_a_step_of_uneven_stages_is_exact_for_gpipe_and_not_too_short_for_1f1b(
    forward: list[float], ratio: float, count: int
) -> None:
    backward = [ratio * seconds for seconds in forward]
    times = {kind: played_through(kind, forward, backward, count) for kind in ("1f1b", "gpipe")}
    assert predicted("gpipe", forward, backward, count) == pytest.approx(times["gpipe"])
    ratio_of_1f1b = predicted("1f1b", forward, backward, count) / times["1f1b"]
    assert 1 - 1e-9 <= ratio_of_1f1b <= 1.5


def test_replicas_divide_the_micro_batches() -> None:
    profile = Profile((LayerProfile("layer", 1.0, 2.0, 0, 0, 0),), 1)
    for replicas, count in [(2, 4), (3, 7), (4, 4)]:
        made = Plan.manual([], [replicas], profile, n_microbatches=count)
        assert made.step_seconds == 3 * math.ceil(count / replicas)


@pytest.mark.parametrize(
    ("kind", "count", "load", "step", "limited_by"),
    [
        # Compute 3 s, exchange 2 (2 - 1) · 80 / 10 = 16 s, link 2 · 20 / 10 = 4 s.
        ("pipedream-stashing", 1, 8.0, 8.0, "exchange"),  # 16 s for 2 minibatches
        ("1f1b", 4, 3 + 16, 3 + 4 + 1 + 19, "exchange"),
    ],
)
def test_loads_by_hand(kind: str, count: int, load: float, step: float, limited_by: str) -> None:
    layers = LayerProfile("a", 1.0, 2.0, 20, 0, 80), LayerProfile("b", 0.5, 0.5, 0, 0, 0)
    made = Plan.manual(
        [1],
        [2, 1],
        Profile(layers, 1),
        Cluster(3, bandwidth=10.0),
        schedule=kind,
        n_microbatches=count,
    )
    cost = made.stages[0].cost
    assert cost is not None
    assert cost.exchange_seconds == 16
    assert cost.transfer_seconds == 4
    assert (cost.load_seconds, cost.limited_by) == (load, limited_by)
    assert made.step_seconds == pytest.approx(step)
