"""Observers whose policies follow the weights of a learner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.processes.functions import wait_until
from tests.contract.processes.rl_functions import make_walk, rows_of, small_walk_policy
from tests.rl_environments import walk_policy
from torchweft import weights
from torchweft.errors import ConfigurationError
from torchweft.launch import Cluster
from torchweft.rl import Agent, Environments, FollowingPolicy, NoObservers, Observers, Trajectory

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ["worker0", "worker1"]
LIMIT_S = 20.0
ENVIRONMENTS = Environments(make_walk, 2, seed=3)


def rounds(observers: Observers, count: int) -> list[Trajectory]:
    return [each for _ in range(count) for each in observers.round()]


def test_copies_decide_as_the_agent_does_with_the_same_weights(group: Cluster) -> None:
    with Observers(
        WORKERS, ENVIRONMENTS, Agent(small_walk_policy()), steps=5, time_limit_s=LIMIT_S
    ) as observers:
        expected = rounds(observers, 2)
    publisher = weights.Publisher(small_walk_policy().network)
    publisher.publish()
    for where in (WORKERS, "threads"):
        following = FollowingPolicy(small_walk_policy, publisher, timeout_s=LIMIT_S)
        assert following.version == 1
        with Observers(
            where, ENVIRONMENTS, following, count=2, steps=5, time_limit_s=LIMIT_S
        ) as observers:
            found = rounds(observers, 2)
        for one, other in zip(rows_of(expected), rows_of(found), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[:-1], other[:-1], strict=True))
        assert all((each.versions == 1).all() for each in found)
        assert observers.staleness == {0: 4}


def test_copies_take_over_what_the_learner_publishes(group: Cluster) -> None:
    policy = small_walk_policy()
    publisher = weights.Publisher(policy.network)
    publisher.publish()
    following = FollowingPolicy(small_walk_policy, publisher, timeout_s=LIMIT_S)
    with Observers(WORKERS, ENVIRONMENTS, following, steps=3, time_limit_s=LIMIT_S) as observers:
        before = observers.round()
        with torch.no_grad():
            for weight in policy.network.parameters():
                weight.mul_(-3.0)
        publisher.publish()
        found: list[Trajectory] = []

        def all_have_it() -> bool:
            found[:] = observers.round()
            return all((each.versions == 2).all() for each in found)

        wait_until(all_have_it, lambda: str([each.versions for each in found]))
    assert {int(each.versions.max()) for each in before} == {1}
    # The decisions are those of the published network.
    for trajectory in found:
        own = walk_policy(rows=2)
        own.network.load_state_dict(policy.network.state_dict())
        logits = own.network(trajectory.observations.flatten(0, 1)).log_softmax(dim=1)
        logs = logits.gather(1, trajectory.actions.flatten()[:, None]).view_as(trajectory.rewards)
        assert torch.allclose(logs, trajectory.outputs["logs"], atol=1e-6)


@pytest.mark.parametrize("where", [WORKERS, "threads"], ids=["workers", "threads"])
def test_rounds_with_copies_are_by_the_newest_version_if_that_is_awaited(
    group: Cluster, where: Any
) -> None:
    publisher = weights.Publisher(small_walk_policy().network)
    publisher.publish()
    following = FollowingPolicy(small_walk_policy, publisher, timeout_s=LIMIT_S, awaits_newest=True)
    with Observers(
        where, ENVIRONMENTS, following, count=2, steps=2, time_limit_s=LIMIT_S
    ) as observers:
        for version in range(1, 6):
            found = observers.round()
            assert len(found) == 2
            assert all((each.versions == version).all() for each in found)
            publisher.publish()
        assert observers.staleness == {0: 10}


def test_mistakes(group: Cluster) -> None:
    publisher = weights.Publisher(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="timeout_s=0: pass a positive time"):
        FollowingPolicy(small_walk_policy, publisher, timeout_s=0)
    publisher.publish()
    following = FollowingPolicy(small_walk_policy, publisher, timeout_s=LIMIT_S)
    with Observers(WORKERS, ENVIRONMENTS, following, steps=3, time_limit_s=LIMIT_S) as observers:
        with pytest.raises(NoObservers, match="WeightsMismatch") as caught:
            observers.round()
        assert caught.value.causes.keys() == set(WORKERS)
    unpublished = FollowingPolicy(
        small_walk_policy, weights.Publisher(small_walk_policy().network), timeout_s=0.05
    )
    with (
        Observers(WORKERS, ENVIRONMENTS, unpublished, steps=3, time_limit_s=LIMIT_S) as observers,
        pytest.raises(NoObservers, match=r"call publish\(\) on the publisher"),
    ):
        observers.round()
