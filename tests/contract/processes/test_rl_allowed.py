"""Observers on workers with an allow-list of modules."""

from __future__ import annotations

import pytest

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options
from tests.contract.processes.rl_functions import LIMIT_S, make_walk, small_walk_policy
from torchweft import rpc
from torchweft.errors import NotAllowed
from torchweft.launch import Nursery
from torchweft.rl import Agent, Environments, FollowingPolicy, Observers
from torchweft.weights import Publisher

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
OWN = ("tests.contract.processes.rl_functions", "tests.rl_environments")


def test_the_entries_of_the_packages_are_enough(nursery: Nursery) -> None:
    listed = options(allowed_modules=("torchweft.rl", "torchweft.weights", "torch", *OWN))
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=listed):
        policy = small_walk_policy()
        publisher = Publisher(policy.network)
        publisher.publish()
        following = FollowingPolicy(small_walk_policy, publisher, timeout_s=LIMIT_S)
        for agent, version in ((Agent(policy), 0), (following, 1)):
            with Observers(
                ["worker0"], Environments(make_walk, 2), agent, steps=2, time_limit_s=LIMIT_S
            ) as observers:
                assert int(observers.round()[0].versions.min()) == version
        with pytest.raises(NotAllowed, match=r"tests\.contract\.processes\.functions"):
            rpc.rpc_sync("worker0", functions.identity, (1,))
