"""``torchweft.rl`` when an observer or the agent is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import torchweft
from tests.contract.processes.functions import wait_until
from tests.contract.processes.rl_functions import (
    LIMIT_S,
    count_made,
    join,
    make_agent,
    make_counted,
    make_walk,
    open_observers,
    resume,
    rounds_until_one_is_left_out,
    take_back,
    train,
)
from tests.open_workers import OpenWorkers
from tests.rl_environments import walk_policy
from torchweft import rpc
from torchweft.errors import ConfigurationError
from torchweft.launch import Cluster, Nursery
from torchweft.rl import Agent, AgentLost, Environments, Observers, Trajectory

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture
def three(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=3, nursery=nursery, check=False) as cluster:
        yield cluster


def test_the_others_go_on_when_an_observer_is_killed(three: Cluster) -> None:
    agent = Agent(walk_policy(rows=8))
    with Observers(
        list(three.names), Environments(make_walk, 2), agent, steps=4, time_limit_s=LIMIT_S
    ) as observers:
        everything = 3 * 2 * 4
        assert steps_of(observers.round()) == everything
        os.kill(three.pids["worker1"], signal.SIGKILL)
        found: list[Trajectory] = []
        wait_until(
            lambda: bool(found.extend(observers.round())) or "worker1" in observers.left_out,
            lambda: "worker1 is not left out",
        )
        # The others lost no step, in no round.
        others = [each for each in found if each.observer != "worker1"]
        assert len(others) % 2 == 0
        assert steps_of(others) == len(others) * 2 * 4
        after = observers.round()
        names = [each.observer for each in after]
        assert names == ["worker0", "worker2"]
        assert steps_of(after) == everything * 2 // 3
        assert "worker1" in str(observers.left_out["worker1"])
        assert agent.policy.state_dict()["states"].keys() == {"0", "1", "4", "5"}
        # Batches wait for two calls now.
        before = agent.policy.forwards
        observers.round()
        assert agent.policy.forwards - before <= 8
        observers.replace(1, "worker2")
        assert steps_of(observers.round()) == everything


def steps_of(trajectories: list[Trajectory]) -> int:
    return sum(each.steps for each in trajectories)


def test_a_killed_agent_goes_on_from_its_snapshot(warm: OpenWorkers, tmp_path: Path) -> None:
    method, directory = f"file://{tmp_path}/store", str(tmp_path / "snapshots")
    names = ["agent", "east", "west"]
    try:
        for rank, name in enumerate(names):
            warm.do(name, join, name, rank, method)
        expected = warm.do("agent", train, names[1:], directory, 3)
        assert expected[0] == 3
        warm.kill("agent")
        warm.do("agent", join, "agent", 0, method)
        found, version = warm.do("agent", resume, names[1:], directory)
    finally:
        for name in names:
            warm.kill(name)
    assert version == 3
    assert found == expected


@pytest.mark.parametrize("way", ["rounds", "stream"])
def test_observers_follow_a_new_agent_after_the_loss_of_theirs(three: Cluster, way: str) -> None:
    agent = rpc.remote("worker2", make_agent)
    environments = Environments(make_counted, 2)
    with Observers(
        ["worker0", "worker1"], environments, agent, steps=4, time_limit_s=LIMIT_S
    ) as observers:

        def collected(rounds: int = 1) -> list[Trajectory]:
            if way == "rounds":
                return [each for _ in range(rounds) for each in observers.round()]
            return list(islice(observers.stream(), 3 * rounds))

        assert {each.observer for each in collected()} == {"worker0", "worker1"}
        state = agent.rpc_sync().state_dict()
        made = [rpc.rpc_sync(f"worker{k}", count_made) for k in (0, 1)]
        os.kill(three.pids["worker2"], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(AgentLost, match=r"'worker2' was lost, .* call follow") as caught:
                collected(rounds=5)  # A stream has trajectories from before.
            assert caught.value.worker == "worker2"
        assert observers.left_out == {}
        restored = Agent(walk_policy())
        restored.load_state_dict({**state, "version": 7})
        observers.follow(restored)
        found = collected()
        assert {each.observer for each in found} == {"worker0", "worker1"}
        assert all((each.versions == 7).all() for each in found)
        assert [rpc.rpc_sync(f"worker{k}", count_made) for k in (0, 1)] == made == [2, 2]
        # From one agent to another that lives, on the worker of an observer.
        observers.follow(rpc.remote("worker0", make_agent))
        assert all((each.versions == 0).all() for each in collected())
        with pytest.raises(ConfigurationError, match="agent is a str, which observers cannot ask"):
            observers.follow("worker0")  # type: ignore[arg-type]


def test_an_observer_whose_worker_came_back_takes_part_again(
    warm: OpenWorkers, tmp_path: Path
) -> None:
    method = f"file://{tmp_path}/store"
    names = ["agent", "east", "west"]
    try:
        for rank, name in enumerate(names):
            warm.do(name, join, name, rank, method)
        assert warm.do("agent", open_observers, names[1:]) == 2
        warm.kill("west")
        assert warm.do("agent", rounds_until_one_is_left_out) == ["west"]
        warm.do("west", join, "west", 2, method)
        assert warm.do("agent", take_back) == (["west"], ["east", "west"])
    finally:
        for name in names:
            warm.kill(name)
