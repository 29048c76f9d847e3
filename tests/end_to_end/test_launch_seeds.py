"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import torch

from tests.contract.processes.test_launch_cluster import draw
from torchweft import rpc
from torchweft.launch import Nursery, cluster
from torchweft.launch.nursery import WARM_MODULES


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
