"""Small environments with gymnasium's interface, which do not need it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.rl import LocalPolicy, categorical


class Space(NamedTuple):
    """A space, as far as observers look at it."""

    shape: tuple[int, ...]
    dtype: Any = np.dtype(np.float32)


class Walk:
    """A random walk with a drift by the action; ends at 2, and after 7 steps."""

    observation_space = Space((3,))
    action_space = Space(())
    limit = 7

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self._where = self._generator.standard_normal()
        self._steps = 0
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self._where, self._steps, self._where**2], np.float32)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._where += 0.3 * self._generator.standard_normal() + (0.2 if action else -0.2)
        self._steps += 1
        over = abs(self._where) > 2
        return self._seen(), self._where, bool(over), not over and self._steps >= self.limit, {}

    def close(self) -> None:
        pass


class Walks:
    """A native vector of walks, with the rule that the step after the end is a reset."""

    metadata: ClassVar = {"autoreset_mode": "NextStep"}
    single_observation_space = Walk.observation_space
    single_action_space = Walk.action_space

    def __init__(self, count: int) -> None:
        self.num_envs = count
        self._walks = [Walk() for _ in range(count)]
        self._ended = np.zeros(count, np.bool_)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        first = 0 if seed is None else seed
        self._ended[:] = False
        seen = [walk.reset(first + place)[0] for place, walk in enumerate(self._walks)]
        return np.stack(seen), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rows = []
        for walk, action, ended in zip(self._walks, actions, self._ended, strict=True):
            row = (walk.reset()[0], 0.0, False, False) if ended else walk.step(int(action))[:4]
            rows.append(row)
        seen, rewards, terminated, truncated = map(np.array, zip(*rows, strict=True))
        self._ended = terminated | truncated
        return seen, rewards, terminated, truncated, {}

    def close(self) -> None:
        pass


class WalkPolicy(LocalPolicy):
    """Samples from a small network; the state counts the decisions of an episode."""

    def decide(
        self, observations: Tensor, draws: Tensor, states: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        actions, logs = categorical(self.network(observations), draws)
        return actions, {"logs": logs, "counts": states[:, 0]}, states + 1


def walk_policy(rows: int = 0) -> WalkPolicy:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
    return WalkPolicy(network, (3,), rows=rows, state_size=1)
