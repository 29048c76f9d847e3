"""Observers of ``torchweft.rl`` with native vectors, and the policy of their agent."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

OBSERVERS = 3
NATIVE = 64
"""Environments of an observer that are one native vector."""
STATE, HIDDEN, ACTIONS = 4, 128, 2
STEPS = 100
"""Steps of each environment in one order of the agent."""


@functools.cache
def policy() -> nn.Module:
    """Returns the policy of the agent; the sizes are those of PyTorch's tutorial."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(STATE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, ACTIONS))


def observers_of(names: list[str], halves: int = 1) -> Any:
    """Returns observers on workers, which ask an agent of this process."""
    from benchmarks.reinforcement.policies import Sampling
    from torchweft import rpc
    from torchweft.rl import Agent, Environments, Observers

    agent = Agent(Sampling(policy(), (STATE,)))
    vector = Environments("CartPole-v1", NATIVE, halves=halves, vectorized=True)
    for name in names:
        rpc.rpc_sync(name, torch.set_num_threads, (1,))
    return Observers(names, vector, agent, steps=STEPS)
