"""The two algorithms: a policy that observers ask, and a learner that updates it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchweft.rl import (
    Agent,
    LocalPolicy,
    ReplayBuffer,
    Trajectory,
    categorical,
    epsilon_greedy,
    join,
    v_trace,
)
from torchweft.rpc import RRef

OBSERVATION, ACTIONS = (4,), 2


class Learner(Protocol):
    """What a training loop needs of an algorithm."""

    agent: Agent

    def learn(self, trajectories: list[Trajectory]) -> float | None:
        """Learns from new steps; returns the loss, or None if there are too few steps yet."""

    def state(self) -> dict[str, Any]:
        """Returns the state of a snapshot."""


# Advantage actor-critic


class ActorCritic(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(*OBSERVATION, width), nn.Tanh(), nn.Linear(width, ACTIONS)
        )
        self.critic = nn.Sequential(nn.Linear(*OBSERVATION, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(observations), self.critic(observations).squeeze(-1)


class SamplingPolicy(LocalPolicy):
    def decide(
        self, observations: Tensor, draws: Tensor, states: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        actions, logs = categorical(self.network.actor(observations), draws)
        return actions, {"log_probabilities": logs}, states


class A2C:
    """Advantage actor-critic; V-trace makes up for steps of older policies."""

    discount, trace_decay = 0.99, 0.95
    entropy_weight, value_weight = 0.01, 0.5

    def __init__(self, environments: int, seed: int, learning_rate: float = 5e-3) -> None:
        torch.manual_seed(seed)
        self.network = ActorCritic(64)
        policy = SamplingPolicy(self.network, OBSERVATION, rows=environments)
        self.agent = Agent(policy)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)

    def learn(self, trajectories: list[Trajectory]) -> float:
        steps = join(trajectories)
        logits, values = self.network(steps.observations)
        logs = logits.log_softmax(dim=-1)
        chosen = logs.gather(-1, steps.actions[..., None]).squeeze(-1)
        with torch.no_grad():
            next_values = self.network(steps.next_observations())[1]
        found = v_trace(
            chosen - steps.outputs["log_probabilities"],
            steps.rewards,
            values,
            next_values,
            steps.terminated,
            steps.ends,
            discount=self.discount,
            trace_decay=self.trace_decay,
        )
        # Steps that were only resets teach nothing.
        keep = steps.valid
        advantages = found.advantages[keep]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        entropy = -(logs.exp() * logs).sum(dim=-1)[keep].mean()
        loss = (
            -(chosen[keep] * advantages).mean()
            + self.value_weight * nn.functional.smooth_l1_loss(values[keep], found.targets[keep])
            - self.entropy_weight * entropy
        )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
        with self.agent.policy.updating():
            self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {"agent": self.agent, "optimizer": self.optimizer}


# Deep Q-learning


class GreedyPolicy(LocalPolicy):
    """Takes the best action, or, ever more rarely, any."""

    epsilon = 1.0

    def decide(
        self, observations: Tensor, draws: Tensor, states: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return epsilon_greedy(self.network(observations), draws, self.epsilon), {}, states


class DQN:
    """Double deep Q-learning from a prioritized replay buffer."""

    discount = 0.99
    batch, first_steps, updates_per_step = 128, 1000, 1 / 4
    explored_steps, least_epsilon = 8000, 0.04
    copied_every = 100

    def __init__(
        self,
        environments: int,
        seed: int,
        buffer: ReplayBuffer | RRef[ReplayBuffer],
        learning_rate: float = 1e-3,
    ) -> None:
        torch.manual_seed(seed)
        self.network, self.older = (
            nn.Sequential(
                nn.Linear(*OBSERVATION, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                nn.Linear(128, ACTIONS),
            )
            for _ in range(2)
        )  # fmt: skip
        self.older.load_state_dict(self.network.state_dict())
        self.policy = GreedyPolicy(self.network, OBSERVATION, rows=environments, draws=2)
        self.agent = Agent(self.policy)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=learning_rate)
        self.buffer = buffer
        self.steps = self.updates = 0

    def learn(self, trajectories: list[Trajectory]) -> float | None:
        buffer: Any = self.buffer.rpc_sync() if isinstance(self.buffer, RRef) else self.buffer
        for each in trajectories:
            buffer.add(each.transitions())
            self.steps += each.steps
        explored = min(1.0, self.steps / self.explored_steps)
        self.policy.epsilon = 1.0 - (1.0 - self.least_epsilon) * explored
        if self.steps < self.first_steps:
            return None
        loss = 0.0
        while self.updates < (self.steps - self.first_steps) * self.updates_per_step:
            sample = buffer.sample(self.batch)
            errors = self._errors(sample.columns)
            loss = self._update((sample.weights * errors.square().clamp(max=1e4)).mean())
            buffer.set_priorities(sample.rows, errors.detach().abs() + 1e-3)
        return loss

    def _errors(self, columns: dict[str, Tensor]) -> Tensor:
        scores = self.network(columns["observations"])
        chosen = scores.gather(1, columns["actions"][:, None]).squeeze(1)
        with torch.no_grad():
            best = self.network(columns["next_observations"]).argmax(dim=1)
            following = self.older(columns["next_observations"])
            following = following.gather(1, best[:, None]).squeeze(1)
            targets = columns["rewards"] + self.discount * following * ~columns["terminated"]
        return chosen - targets

    def _update(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        with self.policy.updating():
            self.optimizer.step()
        self.updates += 1
        if self.updates % self.copied_every == 0:
            self.older.load_state_dict(self.network.state_dict())
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {"agent": self.agent, "optimizer": self.optimizer, "older": self.older}
