"""Tests balanced cuts against all cuts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from tests.unit.pipeline.partition.reference import layer_cuts
from torchweft.pipeline.partition import (
    LayerProfile,
    PartitionError,
    Plan,
    Profile,
    balance,
)


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


def test_equal_layers_are_shared_evenly() -> None:
    assert balance([1] * 8, 4) == (2, 4, 6)
    sizes = [len(stage.layers) for stage in Plan.manual(balance([1] * 10, 4), n_layers=10).stages]
    assert sorted(sizes) == [2, 2, 3, 3]
    assert balance([0, 0, 0], 3) == (1, 2)
    assert balance([5], 1) == ()


def test_a_heavy_layer_leaves_the_others_even() -> None:
    assert balance([100, 1, 1, 1, 1], 3) == (1, 3)


def test_a_profile_is_balanced_by_time() -> None:
    #                          forward, backward, output, saved, weights
    profile = Profile(
        (
            LayerProfile("slow", 4.0, 4.0, 0, 1, 1),
            LayerProfile("wide", 1.0, 1.0, 0, 90, 1),
            LayerProfile("wide", 1.0, 1.0, 0, 90, 1),
            LayerProfile("heavy", 1.0, 1.0, 0, 1, 5, fixed_bytes=1, optimizer_ratio=2.0),
        ),
        batch_size=1,
    )
    assert balance(profile, 2) == (1,)


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
def test_mistakes_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        balance(*arguments)


def test_many_layers() -> None:
    assert len(balance([number % 7 for number in range(300)], 40)) == 39
