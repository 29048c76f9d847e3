"""Environments and learners that the workers of these tests run."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tests.rl_environments import Space, Walk, WalkPolicy, walk_policy
from torchweft import checkpoint, rpc
from torchweft.rl import Agent, Decision, Environments, Observers, Trajectory
from torchweft.rpc import functions

LIMIT_S = 20.0

_may_go_on = threading.Event()
_kept: dict[str, Any] = {}


def go_on() -> None:
    _may_go_on.set()


def make_walk() -> Walk:
    return Walk()


class Gated(Walk):
    """A walk whose environment 1 takes its third step only when it may."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._is_gated, self._taken = seed == 1, 0
        return super().reset(seed)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        if self._is_gated and self._taken == 3:
            assert _may_go_on.wait(LIMIT_S)
        return super().step(action)


class Narrow(Walk):
    """A walk with other spaces."""

    observation_space = Space((2,))

    def _seen(self) -> Any:
        return super()._seen()[:2]


def make_by_worker() -> Walk:
    """Makes other environments on one worker: as if its files were others."""
    return Narrow() if rpc.get_worker_info().name == "worker1" else Walk()


def change_program() -> None:
    """Has this worker run another version of this module."""
    globals()["LIMIT_S"] = 21.0


def restore_program() -> None:
    globals()["LIMIT_S"] = 20.0


class OneShort(WalkPolicy):
    """A policy that forgets one environment."""

    def decide(self, observations: Tensor, draws: Tensor, states: Tensor) -> Any:
        actions, outputs, states = super().decide(observations, draws, states)
        return actions[:-1], outputs, states


class Patient(Agent):
    """An agent whose batches wait until they are full, also on a busy machine."""

    @functions.batched(longest_wait=LIMIT_S)
    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        found: Decision = Agent.act.__wrapped__(self, observations, environments)  # type: ignore[attr-defined]
        return found


LONGEST_WAIT_S = 0.4


class Limited(Agent):
    """An agent whose batches wait for long enough on a busy machine, but not for ever."""

    @functions.batched(longest_wait=LONGEST_WAIT_S)
    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        found: Decision = Agent.act.__wrapped__(self, observations, environments)  # type: ignore[attr-defined]
        return found


def rows_of(trajectories: list[Trajectory]) -> list[Any]:
    return [
        [each.observations, each.actions, each.outputs["logs"], each.versions]
        for each in trajectories
    ]


def learner(where: list[str]) -> tuple[Agent, Observers]:
    """Makes an agent that changes by what it learns, and its observers."""
    agent = Agent(walk_policy(rows=4))
    environments = Environments(make_walk, 2)
    return agent, Observers(where, environments, agent, steps=6, time_limit_s=LIMIT_S)


def learn(agent: Agent, trajectories: list[Trajectory]) -> None:
    with agent.policy.updating() as network, torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(sum(each.rewards.mean() for each in trajectories), alpha=0.01)


def join(name: str, rank: int, method: str) -> None:
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=10.0, rpc_timeout=15.0)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


def weights_of(agent: Agent) -> list[Any]:
    return [agent.version, *(each.tolist() for each in agent.policy.network.state_dict().values())]


def train(where: list[str], directory: str, rounds: int) -> list[Any]:
    """Trains, saves a snapshot, and returns the version and the weights."""
    agent, observers = learner(where)
    _kept["observers"] = observers
    for _ in range(rounds):
        learn(agent, observers.round())
    checkpoint.save(directory, {"agent": agent}, step=rounds)
    return weights_of(agent)


def resume(where: list[str], directory: str) -> tuple[list[Any], int]:
    """Restores the agent; returns what it is now, and the version of a round that follows."""
    agent, observers = learner(where)
    with observers:
        checkpoint.restore(directory, {"agent": agent}, random_states=False)
        found = observers.round()
        assert len(found) == len(where)
        return weights_of(agent), int(found[0].versions.min())


def open_observers(where: list[str]) -> int:
    """Makes observers that stay; returns how many trajectories a round has."""
    _, observers = _kept["learner"] = learner(where)
    return len(observers.round())


def rounds_until_one_is_left_out() -> list[str]:
    _, observers = _kept["learner"]
    while not observers.left_out:
        observers.round()
    assert observers.take_back() == []  # Its worker is not there.
    assert len(observers.round()) == len(observers) - 1
    return list(observers.left_out)


def take_back() -> tuple[list[str], list[str]]:
    """Returns the observers that take part again, and all that do."""
    _, observers = _kept.pop("learner")
    with observers:
        return observers.take_back(), [each.observer for each in observers.round()]


def small_walk_policy() -> WalkPolicy:
    return walk_policy(rows=2)


def make_agent() -> Agent:
    return Agent(walk_policy())


class Telling(Walk):
    """A walk that tells the agent's worker of its steps before it returns."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._number = seed
        return super().reset(seed)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        rpc.rpc_sync("driver", note_step, args=(self._number,))
        return super().step(action)


_steps = Counter[int]()
_stepped = threading.Condition()


def note_step(number: int) -> None:
    with _stepped:
        _steps[number] += 1
        _stepped.notify_all()


def forget_steps() -> None:
    _steps.clear()


class Holding(Agent):
    """An agent that answers one of two environments only when the other has stepped meanwhile."""

    @functions.batched(largest=1)
    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        number, decisions, _ = environments[0, 0].tolist()
        # Environment 0 is asked about first.
        needed = decisions + (1 if number else 0)
        with _stepped:
            assert _stepped.wait_for(lambda: _steps[1 - number] >= needed, LIMIT_S / 2)
        found: Decision = Agent.act.__wrapped__(self, observations, environments)  # type: ignore[attr-defined]
        return found


_made: list[int] = []


def make_counted() -> Walk:
    _made.append(1)
    return Walk()


def count_made() -> int:
    return len(_made)


def mean_size_of_batches(agent: rpc.RRef[Agent]) -> float:
    """Asks an agent on another worker for its statistics."""
    return float(agent.rpc_sync().statistics().mean_size)
