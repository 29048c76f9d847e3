"""Many observers and one agent, in the two forms of PyTorch's RPC tutorials.

A program of ``torch.distributed.rpc`` that knows nothing of Weft::

    python -m torchweft.compat tutorial.py one      # a call and a forward pass for each step
    python -m torchweft.compat tutorial.py batched  # a forward pass for all observers
    python tutorial.py batched                      # the same on torch.distributed.rpc

REINFORCE learns to balance a pole, with the sizes of the tutorials. The agent starts an episode on
all observers; each observer asks for actions, step by step, and the agent learns from all of them.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.distributed.rpc as rpc  # noqa: TID251 (Weft's, with -m torchweft.compat)
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.rpc.functions import async_execution  # noqa: TID251
from torch.distributions import Categorical
from torch.futures import Future

OBSERVERS, STEPS = 3, 100
STATE, HIDDEN, ACTIONS = 4, 128, 2
DISCOUNT, LEARNING_RATE, DROPOUT = 0.99, 1e-2, 0.6
AGENT, OBSERVER = "agent", "observer{}"


def call_method(method: Callable[..., Any], reference: rpc.RRef, *args: Any) -> Any:
    return method(reference.local_value(), *args)


def remote_method(method: Callable[..., Any], reference: rpc.RRef, *args: Any) -> Any:
    return rpc.rpc_sync(reference.owner(), call_method, (method, reference, *args))


def remote_method_async(method: Callable[..., Any], reference: rpc.RRef, *args: Any) -> Any:
    return rpc.rpc_async(reference.owner(), call_method, (method, reference, *args))


class Policy(nn.Module):
    """States ``(..., 4)`` to the chances of the actions ``(..., 2)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(STATE, HIDDEN)
        self.dropout = nn.Dropout(DROPOUT)
        self.second = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, states: Tensor) -> Tensor:
        return torch.softmax(self.second(torch.relu(self.dropout(self.first(states)))), dim=-1)


class Observer:
    """Runs environments on its own worker."""

    def __init__(self, number: int, environments: int) -> None:
        self.number = number
        self.environments = [gymnasium.make("CartPole-v1") for _ in range(environments)]
        for place, each in enumerate(self.environments):
            each.reset(seed=1000 * number + place)

    def run_episode(self, agent: rpc.RRef, ask: Callable[..., Tensor], steps: int) -> Tensor:
        """Takes steps in each environment, which begins anew where it ends.

        Returns:
            The returns that followed each step, ``(steps, environments)``.
        """
        states = [each.reset()[0] for each in self.environments]
        rewards = torch.zeros(steps, len(states))
        lasts = torch.zeros(steps, len(states), dtype=torch.bool)
        for step in range(steps):
            actions = ask(agent, self.number, torch.from_numpy(np.stack(states))).tolist()
            for place, (each, action) in enumerate(zip(self.environments, actions, strict=True)):
                states[place], rewards[step, place], terminated, truncated, _ = each.step(action)
                lasts[step, place] = terminated or truncated
                if terminated or truncated:
                    states[place] = each.reset()[0]
            if ask is ask_alone:
                remote_method(Agent.report_rewards, agent, self.number, rewards[step])
        return returns_of(rewards, lasts)


def returns_of(rewards: Tensor, lasts: Tensor) -> Tensor:
    """Returns the discounted sums of the rewards from each step to the end of its episode."""
    returns, following = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for step in reversed(range(len(rewards))):
        following = rewards[step] + DISCOUNT * following * ~lasts[step]
        returns[step] = following
    return returns


class Agent:
    """Decides for all observers, and learns from all episodes; lives on the first worker.

    Args:
        workers: The names of the observers' workers.
        environments: How many each of them has.
    """

    def __init__(self, workers: Sequence[str], environments: int) -> None:
        torch.manual_seed(543)
        self.reference = rpc.RRef(self)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        self.observers = [
            rpc.remote(name, Observer, (number, environments))
            for number, name in enumerate(workers)
        ]
        self.logs: list[list[Tensor]] = [[] for _ in workers]
        self.rewards: list[list[Tensor]] = [[] for _ in workers]
        self.forwards = 0
        self.lock = threading.Lock()
        self.states = torch.zeros(len(workers), environments, STATE)
        self.waiting = 0
        self.decided: Future[Tensor] = Future()

    def decide(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns an action for each state, and the logarithm of its chance."""
        chances = Categorical(self.policy(states))
        actions = chances.sample()
        self.forwards += 1
        return actions, chances.log_prob(actions)

    def select_action(self, observer: int, states: Tensor) -> Tensor:
        """Decides for one observer; called by it for each step."""
        actions, logs = self.decide(states)
        self.logs[observer].append(logs)
        return actions

    def report_rewards(self, observer: int, rewards: Tensor) -> None:
        """Takes the rewards of a step; called by the observer."""
        self.rewards[observer].append(rewards)

    @staticmethod
    @async_execution
    def select_action_batch(reference: rpc.RRef, observer: int, states: Tensor) -> Future[Tensor]:
        """Decides for all observers when the last one asks; called by each for each step."""
        self = reference.local_value()
        with self.lock:
            self.states[observer].copy_(states)
            decided = self.decided
            actions = decided.then(lambda done: done.wait()[observer])
            self.waiting += 1
            is_full = self.waiting == len(self.observers)
            if is_full:
                self.waiting, self.decided = 0, Future()
                all_actions, all_logs = self.decide(self.states.clone())
                for own, logs in zip(self.logs, all_logs.unbind(), strict=True):
                    own.append(logs)
        if is_full:
            decided.set_result(all_actions)
        return actions

    def run_episode(self, ask: Callable[..., Tensor], steps: int) -> float:
        """Runs an episode on all observers, and learns from it; returns the mean return."""
        calls = [
            remote_method_async(Observer.run_episode, each, self.reference, ask, steps)
            for each in self.observers
        ]
        return self.learn([call.wait() for call in calls])

    def learn(self, returns: list[Tensor]) -> float:
        """Learns by REINFORCE; returns the mean return of a step."""
        gains = torch.stack(returns)
        logs = torch.stack([torch.stack(own) for own in self.logs])
        loss = -(logs * (gains - gains.mean()) / (gains.std() + 1e-6)).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for own in (*self.logs, *self.rewards):
            own.clear()
        return float(gains.mean())


def ask_alone(agent: rpc.RRef, observer: int, states: Tensor) -> Tensor:
    """Asks for the actions of one observer."""
    found: Tensor = remote_method(Agent.select_action, agent, observer, states)
    return found


def ask_together(agent: rpc.RRef, observer: int, states: Tensor) -> Tensor:
    """Asks for them, and waits until all observers have asked."""
    found: Tensor = rpc.rpc_sync(
        agent.owner(), Agent.select_action_batch, (agent, observer, states)
    )
    return found


WAYS = {"one": ask_alone, "batched": ask_together}


def run_worker(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    name = OBSERVER.format(rank) if rank else AGENT
    rpc.init_rpc(name, rank=rank, world_size=1 + OBSERVERS)
    if rank == 0:
        workers = [OBSERVER.format(number + 1) for number in range(OBSERVERS)]
        agent = Agent(workers, options.environments)
        began_s = time.monotonic()
        for episode in range(options.episodes):
            print(f"episode {episode}: {agent.run_episode(WAYS[options.way], STEPS):.2f}")
        seconds = time.monotonic() - began_s
        steps = options.episodes * OBSERVERS * options.environments * STEPS
        print(
            f"{steps / seconds:.0f} environment steps/s on {rpc.__name__}, "
            f"{agent.forwards} forward passes",
            flush=True,
        )
    rpc.shutdown()


def find_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description="Many observers and one agent.")
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("--episodes", type=int, default=30)
    parser.add_argument("--environments", type=int, default=1, help="of each observer")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(find_port()))
    mp.start_processes(run_worker, (options,), nprocs=1 + OBSERVERS, start_method="fork")


if __name__ == "__main__":
    main()
