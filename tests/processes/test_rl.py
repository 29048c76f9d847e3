"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import pytest

from tests.contract.processes.rl_functions import (
    make_walk,
)
from tests.contract.processes.test_rl import LIMIT_S, WORKERS
from tests.processes.rl_internals import Lying
from tests.rl_environments import walk_policy
from torchweft import rpc
from torchweft.errors import BatchError
from torchweft.launch import Cluster
from torchweft.rl import (
    Agent,
    Environments,
    Observers,
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
