"""Observers, an agent and published weights in a group of strict workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweft
from tests import remains
from tests.contract.processes import attacks, rl_functions
from tests.contract.processes.functions import options
from tests.contract.processes.rl_functions import (
    LIMIT_S,
    learn,
    make_walk,
    rows_of,
    small_walk_policy,
)
from tests.rl_environments import walk_policy
from torchweft import rl, rpc, weights
from torchweft.errors import NotAllowed
from torchweft.launch import Cluster, Nursery
from torchweft.rl import (
    Agent,
    Environments,
    FollowingPolicy,
    Observer,
    Observers,
    ReplayBuffer,
    WrongActions,
)
from torchweft.weights import Publisher

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
WORKERS = ["worker0", "worker1"]


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    own = (attacks.is_imported, remains.count_references, make_walk, small_walk_policy)
    own = (*own, rl_functions.mean_size_of_batches)
    strict = options(
        strict=True,
        callables=(*rl.CALLABLES, *weights.CALLABLES, *own),  # type: ignore[arg-type]
    )
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict) as group:
        yield group


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["by value", "by reference"])
def test_observers_ask_an_agent_as_in_one_process(group: Cluster, limit: int) -> None:
    def trained(where: Any) -> list[Any]:
        agent = Agent(walk_policy(rows=4))
        found = []
        with Observers(
            where, Environments(make_walk, 2), agent, count=2, steps=5, time_limit_s=LIMIT_S,
            by_reference_bytes=limit,
        ) as observers:  # fmt: skip
            for _ in range(2):
                found += (new := observers.round())
                learn(agent, new)
            assert observers.left_out == {}
        return rows_of(found)

    for one, other in zip(trained("process"), trained(WORKERS), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_copies_of_a_policy_follow_a_publisher(group: Cluster) -> None:
    policy = small_walk_policy()
    publisher = Publisher(policy.network, after=6)
    publisher.publish()
    following = FollowingPolicy(small_walk_policy, publisher, timeout_s=LIMIT_S)
    with Observers(
        WORKERS, Environments(make_walk, 2), following, steps=3, time_limit_s=LIMIT_S
    ) as observers:
        assert [int(each.versions.min()) for each in observers.round()] == [7, 7]


def test_the_statistics_of_an_agent_on_another_worker(group: Cluster) -> None:
    agent = Agent(walk_policy(rows=4))
    with Observers(WORKERS, Environments(make_walk, 2), agent, steps=3) as observers:
        observers.round()
    found = rpc.rpc_sync("worker0", rl_functions.mean_size_of_batches, (rpc.RRef(agent),))
    assert found == agent.statistics().mean_size > 0


def test_a_replay_buffer(group: Cluster) -> None:
    buffer = rpc.remote("worker0", ReplayBuffer, (10,), {"priority_power": 1.0})
    buffer.rpc_sync().add({"values": torch.arange(4)})
    sample = buffer.rpc_sync().sample(3)
    assert torch.equal(sample.columns["values"], sample.rows)
    with pytest.raises(rl.BadPriority) as caught:
        buffer.rpc_sync().set_priorities(sample.rows, -torch.ones(3))
    assert caught.value.position == 0


def test_an_error_of_the_agent_names_the_observer(group: Cluster) -> None:
    agent = Agent(rl_functions.OneShort(nn.Linear(3, 2), (3,), state_size=1))
    with Observers(
        ["worker0"], Environments(make_walk, 2), agent, steps=2, time_limit_s=LIMIT_S
    ) as observers:
        with pytest.raises(rl.NoObservers, match=r"observer 'worker0': .*returned actions"):
            observers.round()
        error = observers.left_out["worker0"]
        assert isinstance(error, WrongActions)
        assert (error.observer, error.expected, error.found) == ("worker0", (2,), (1,))


# What is refused


def observer_of(make: Any) -> Any:
    environments = Environments(make, 1)
    agent = rpc.RRef(Agent(walk_policy()))
    return rpc.rpc_sync("worker0", Observer, (0, environments, rl.RemotePolicy(agent, 5.0)))


def test_environments_of_other_functions_and_modules(group: Cluster) -> None:
    with pytest.raises(NotAllowed, match="go_on"):
        observer_of(rl_functions.go_on)
    with pytest.raises(NotAllowed, match="register a function"):
        observer_of("this:Zen-v0")
    assert not rpc.rpc_sync("worker0", attacks.is_imported, ("this",))
