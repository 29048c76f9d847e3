"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import pytest
import torch

from tests.contract.processes.rl_functions import (
    make_walk,
)
from tests.contract.processes.test_rl import LIMIT_S, WORKERS
from tests.processes.rl_internals import Lying
from tests.rl_environments import walk_policy
from torchweft import checkpoint, rpc
from torchweft.errors import BatchError
from torchweft.launch import Cluster
from torchweft.rl import (
    Agent,
    Environments,
    Observers,
    ReplayBuffer,
    WrongObservations,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


def test_observations_that_cannot_be_stacked_fail_alone(group: Cluster) -> None:
    agent = Agent(walk_policy())
    policy = Lying(rpc.RRef(agent), "worker1")
    with Observers(
        WORKERS, Environments(make_walk, 2), policy, steps=3, time_limit_s=LIMIT_S
    ) as observers:
        assert [each.observer for each in observers.round()] == ["worker0"]
        error = observers.left_out["worker1"]
        assert isinstance(error, (BatchError, WrongObservations))
        assert "[2, 2]" in str(error) or "2, 2]" in str(error)
        assert [each.observer for each in observers.round()] == ["worker0"]


def test_a_replay_buffer_moves_onto_another_worker_with_its_priorities_and_draws(
    group: Cluster,
) -> None:
    options = {"priority_power": 0.6}
    buffer = ReplayBuffer(6, **options)
    buffer.add({"x": torch.arange(8)})
    buffer.set_priorities(torch.tensor([2, 5]), torch.tensor([0.1, 9.0]))
    there = rpc.remote("worker0", ReplayBuffer, (6,), options)
    checkpoint.copy_state({"replay": buffer}, {"replay": there})
    for _ in range(3):
        moved, expected = there.rpc_sync().sample(5), buffer.sample(5)
        assert torch.equal(moved.columns["x"], expected.columns["x"])
        assert torch.equal(moved.rows, expected.rows)
        assert torch.equal(moved.weights, expected.weights)
