from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.launch.worker import check_seed, seed_generators, worker_seed


@pytest.fixture(autouse=True)
def _leave_the_generators_alone() -> Iterator[None]:
    python, legacy, state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    numpy.random.set_state(legacy)
    torch.set_rng_state(state)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def test_a_seed_makes_all_three_generators_reproducible() -> None:
    seed_generators(7)
    first = draw()
    seed_generators(7)
    assert draw() == first
    seed_generators(8)
    assert not set(draw()) & set(first)


def test_without_a_seed_all_three_differ_each_time() -> None:
    seed_generators(None)
    first = draw()
    seed_generators(None)
    assert not set(draw()) & set(first)


def test_each_worker_has_a_seed_of_its_own_and_always_the_same() -> None:
    seeds = [worker_seed(seed, name) for seed in (0, 1, 10) for name in ("ps", "worker1", "0")]
    assert len(set(seeds)) == len(seeds)
    assert worker_seed(0, "worker0") == 1856092884065959039
    assert worker_seed(None, "worker0") is None


@pytest.mark.parametrize("value", ["0", 1.0])
def test_a_seed_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"seed is .*; pass an integer"):
        check_seed(value)
    with pytest.raises(ConfigurationError, match="seed is -1; it must be 0 or more"):
        check_seed(-1)
