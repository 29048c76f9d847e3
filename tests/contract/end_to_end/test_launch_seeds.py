"""A launcher's seed makes random numbers reproducible, and different for each worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.processes.test_launch_cluster import draw
from tests.contract.processes.weft_run import Start, finish, running
from torchweft import rpc
from torchweft.launch import Nursery, cluster
from torchweft.launch.nursery import WARM_MODULES


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


def test_a_seed_makes_different_numbers_reproducible() -> None:
    state = torch.get_rng_state()
    drawn = []
    # The second nursery has imported nothing when its workers begin.
    for preload in (WARM_MODULES, ()):
        with Nursery(preload=preload) as own, cluster(workers=2, nursery=own, seed=3):
            drawn.append([rpc.rpc_sync(f"worker{rank}", draw) for rank in (0, 1)])
    assert drawn[0] == drawn[1]
    assert len({number for numbers in drawn[0] for number in numbers}) == 6
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_makes_different_numbers_of_warm_workers_reproducible(start: Start) -> None:
    body = """
    import random
    import numpy, torch
    print(random.random(), float(numpy.random.random()), float(torch.rand(())))
    """
    status, first, _ = finish(start(body, "--warm", "--seed", "5", count=2))
    assert status == 0
    assert len({number for line in first for number in line.split()[1:]}) == 6
    assert sorted(finish(start(body, "--warm", "--seed", "5", count=2))[1]) == sorted(first)
