"""Rules that freeze layers, the number of stages that are left, and the order of samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import ConfigurationError
from torchweft.pipeline.elastic import (
    FreezeByNorm,
    FreezeFraction,
    Freezing,
    Samples,
    choose_length,
    largest_part,
)


def frozen_after(rule: Freezing, epochs: int, norms: list[float]) -> list[int]:
    found = [0]
    for epoch in range(1, epochs + 1):
        found.append(rule.n_frozen(epoch, found[-1], norms))
    return found[1:]


def test_a_fraction_of_the_layers_that_still_train() -> None:
    assert frozen_after(FreezeFraction(1 / 3), 6, [1.0] * 12) == [4, 6, 8, 9, 10, 10]
    assert frozen_after(FreezeFraction(0.5, first=2, every=2), 6, [1.0] * 8) == [0, 4, 4, 6, 6, 7]


def test_the_layer_with_the_smallest_gradient_bounds_the_fraction() -> None:
    rule = FreezeByNorm(1 / 3)
    assert rule.n_frozen(1, 0, [0.1, 0.5, 0.2, 0.9, 0.9, 0.9]) == 0
    assert rule.n_frozen(1, 0, [0.5, 0.1, 0.2, 0.9, 0.9, 0.9]) == 1
    assert rule.n_frozen(1, 0, [0.9, 0.5, 0.5, 0.3, 0.2, 0.9]) == 2  # a third of six
    assert rule.n_frozen(2, 2, [0.0, 0.0, 0.5, 0.1, 0.2, 0.9]) == 3
    assert rule.n_frozen(2, 2, [0.0, math.inf, math.inf, 0.5, 0.2, 0.9]) == 3


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 8), st.data())
def test_no_stage_is_larger_than_at_the_beginning(
    costs: list[float], n_workers: int, data: st.DataObject
) -> None:
    limit = largest_part(costs, min(n_workers, len(costs)))
    n_frozen = data.draw(st.integers(0, len(costs) - 1))
    left = costs[n_frozen:]
    length = choose_length(left, n_workers, limit)
    assert n_workers % length == 0
    assert length <= len(left)
    lengths = [each for each in range(1, length) if n_workers % each == 0]
    assert all(largest_part(left, each) > limit for each in lengths)
    if n_workers <= len(left):
        assert largest_part(left, length) <= limit * (1 + 1e-9)


# The order of samples: all once an epoch, and the same after a restart


def taken(samples: Samples, epochs: int) -> list[list[int]]:
    found = []
    while samples.epoch < epochs:
        found += [chosen.tolist() for chosen in samples]
    return found


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_every_sample_once_an_epoch(count: int, batch: int, seed: int) -> None:
    if batch > count:
        with pytest.raises(ConfigurationError, match=f"pass a batch of 1 to {count}"):
            Samples(count, batch, seed)
        return
    samples = Samples(count, batch, seed)
    batches = taken(samples, 2)
    assert len(batches) == 2 * len(samples)
    for epoch in (batches[: len(samples)], batches[len(samples) :]):
        numbers = [number for each in epoch for number in each]
        assert len(set(numbers)) == len(numbers) == count - count % batch
        assert set(numbers) <= set(range(count))


@given(st.integers(0, 11))
def test_it_goes_on_where_its_state_was_taken(place: int) -> None:
    expected = taken(Samples(12, 3, seed=5), 3)
    samples, found = Samples(12, 3, seed=5), []
    state = samples.state_dict()
    while samples.epoch < 3:
        for chosen in samples:
            found.append(chosen.tolist())
            if len(found) == place + 1:
                state = samples.state_dict()
    again = Samples(12, 3)
    again.load_state_dict(state)
    assert found == expected
    assert taken(again, 3) == expected[place + 1 :]


def test_a_state_that_is_loaded_within_an_epoch_counts_at_the_next_batch() -> None:
    expected = taken(Samples(12, 3), 3)
    samples, found, state = Samples(12, 3), [], None
    while samples.epoch < 3:
        for chosen in samples:
            found.append(chosen.tolist())
            if len(found) == 3:
                state = samples.state_dict()
            if len(found) == 6 and state is not None:  # in the next epoch
                samples.load_state_dict(state)
                state = None
    assert found == expected[:6] + expected[3:]


def test_numbers_out_of_range() -> None:
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="above 0 and below 1"):
            FreezeFraction(fraction)
        with pytest.raises(ConfigurationError, match="above 0 and below 1"):
            FreezeByNorm(fraction)
    with pytest.raises(ConfigurationError, match="1 or more"):
        FreezeFraction(first=0)
