"""An agent with a policy, and observers that ask it for actions in their own worlds.

As in PyTorch's tutorial on the RPC framework, with the policy's sizes; each step of an observer
makes two calls to the agent. The world is a simplified pole to balance, which suffices here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frame.api import current
from benchmarks.training.references import remote_method, remote_method_async, seed

api = current()

STATE, HIDDEN, ACTIONS, DISCOUNT = 4, 128, 2, 0.99


class World:
    """A pole on a cart, to be balanced by pushes to the left or right."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> Tensor:
        self._position, self._speed, self._angle, self._turn = 0.0, 0.0, 0.02, 0.0
        return self._state()

    def step(self, action: int) -> tuple[Tensor, float]:
        """Advances the world by 0.02 s; returns the state and the reward."""
        push, moment_s = (1.0 if action else -1.0), 0.02
        self._turn += moment_s * (
            15.0 * math.sin(self._angle) - 15.0 * push * math.cos(self._angle)
        )
        self._speed += moment_s * 10.0 * push
        self._angle += moment_s * self._turn
        self._position += moment_s * self._speed
        if abs(self._angle) > 0.3:
            return self.reset(), 0.0
        return self._state(), 1.0

    def _state(self) -> Tensor:
        return torch.tensor([[self._position, self._speed, self._angle, self._turn]])


class Observer:
    """Runs a world on its own worker.

    Args:
        number: Index of the observer.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._world = World()

    def run_episode(self, agent: Any, steps: int) -> None:
        """Asks the agent for every action, and reports every reward."""
        state = self._world.reset()
        for _ in range(steps):
            action = remote_method(Agent.select_action, agent, self._number, state)
            state, reward = self._world.step(action)
            remote_method(Agent.report_reward, agent, self._number, reward)


class Agent:
    """Lives on the first worker, and learns after each episode."""

    def __init__(self) -> None:
        seed(0)
        self._self = api.rpc.RRef(self)
        self._policy = nn.Sequential(
            nn.Linear(STATE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, ACTIONS)
        )
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=0.01)
        numbers = range(len(api.peers))
        self._observers = [
            api.rpc.remote(peer, Observer, args=(number,))
            for number, peer in zip(numbers, api.peers, strict=True)
        ]
        # One generator per observer, so that the order of their calls makes no difference.
        self._random = [torch.Generator().manual_seed(number) for number in numbers]
        self._log_probabilities: list[list[Tensor]] = [[] for _ in numbers]
        self._rewards: list[list[float]] = [[] for _ in numbers]

    def select_action(self, observer: int, state: Tensor) -> int:
        """Draws an action from the policy; called by observers."""
        log_probabilities = torch.log_softmax(self._policy(state), dim=1)
        probabilities = log_probabilities.detach().exp()
        action = int(torch.multinomial(probabilities, 1, generator=self._random[observer]))
        self._log_probabilities[observer].append(log_probabilities[0, action])
        return action

    def report_reward(self, observer: int, reward: float) -> None:
        """Records a reward; called by observers."""
        self._rewards[observer].append(reward)

    def train(self, steps: int) -> list[float]:
        """Runs an episode of ``steps`` steps on all observers; returns its loss."""
        calls = [
            remote_method_async(Observer.run_episode, observer, self._self, steps)
            for observer in self._observers
        ]
        for call in calls:
            call.wait()
        return [self._learn()]

    def _learn(self) -> float:
        losses = []
        for log_probabilities, rewards in zip(self._log_probabilities, self._rewards, strict=True):
            returns = _discounted(rewards)
            losses.append(-(torch.stack(log_probabilities) * returns).sum())
            log_probabilities.clear()
            rewards.clear()
        loss = torch.stack(losses).sum()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return float(loss)


def _discounted(rewards: list[float]) -> Tensor:
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        returns.append(total)
    found = torch.tensor(returns[::-1])
    return (found - found.mean()) / (found.std() + 1e-6)
