"""The order of samples: all once an epoch, and the same after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.elastic import Samples


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


def test_epochs_and_seeds_differ() -> None:
    first, second = taken(Samples(64, 64), 2)
    assert first != second
    assert taken(Samples(64, 64, seed=1), 1) != [first]
    assert taken(Samples(64, 64), 1) == [first]


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


def test_numbers_must_be_whole() -> None:
    with pytest.raises(ArgumentTypeError, match="count"):
        Samples(1.5, 1)  # type: ignore[arg-type]
