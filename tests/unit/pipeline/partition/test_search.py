"""Tests the dynamic programme on random loads and tolls, against all pipelines."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from tests.unit.pipeline.partition.reference import Stages, all_stages
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


@pytest.mark.parametrize("way", ["best_load", "cheapest"])
def test_of_equal_pipelines_the_shortest_is_taken(way: str) -> None:
    zeros = np.where(np.tri(5, dtype=bool), math.inf, 0.0)
    search = Search(4, 3, lambda *_: zeros, lambda *_: np.zeros(5), lambda n: range(n, 0, -1))
    assert getattr(search, way)().stages == ((range(4), 3),)
