"""Tests the cost model and its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from torchweft.pipeline.partition import Cluster, LayerProfile, PartitionError, Plan, Profile
from torchweft.pipeline.partition.costs import bytes_text, seconds_text


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


# Tests which clusters there can be, and what they answer.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0), "has 0 workers"),
        ((1, 0.0), "bandwidth is 0.0 bytes/s; it must exceed 0"),
        ((1, math.nan), "bandwidth is nan"),
        ((2, 1.0, -1), "a worker has a memory limit of -1 bytes"),
        ((2, 1.0, None, 2), "workers_per_host=2 and host_bandwidth=None: give both"),
        ((2, 1.0, None, None, 1.0), "workers_per_host=None and host_bandwidth=1.0: give both"),
        ((2, 1.0, None, 0, 1.0), "workers_per_host=0 must be 1 or more"),
        ((2, 1.0, None, 1, 2.0), "host_bandwidth=2.0 bytes/s must .* be at most .* 1.0"),
        ((2, 1.0, None, 1, 0.0), "host_bandwidth=0.0 bytes/s must exceed 0"),
    ],
)
def test_mistakes_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Cluster(*arguments)


# Tests which measurements there can be.


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
@pytest.mark.parametrize(
    "field",
    "forward_seconds backward_seconds activation_bytes saved_bytes weight_bytes fixed_bytes "
    "optimizer_ratio".split(),
)
def test_costs_are_finite_and_not_negative(field: str, value: float) -> None:
    numbers: dict[str, Any] = dict.fromkeys(
        "forward_seconds backward_seconds activation_bytes saved_bytes weight_bytes".split(), 0
    )
    with pytest.raises(PartitionError, match=f"layer 'fc' has {field}={value}; it must be finite"):
        LayerProfile(name="fc", **{**numbers, field: value})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (3.14159e-9, "3.14 ns"),
        (0.0123, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (45678.9, "45679 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20 - 1, "10.0 MiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_a_profile_has_layers_and_a_batch() -> None:
    with pytest.raises(PartitionError, match="no layers"):
        Profile((), 1)
    with pytest.raises(PartitionError, match="batch_size=0"):
        Profile((LayerProfile("a", 0, 0, 0, 0, 0),), 0)
