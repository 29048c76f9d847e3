"""Functions that read internals; ``rl_functions.py`` in the contract has the others."""

from __future__ import annotations

from torch import Tensor

from torchweft import rpc
from torchweft.rl import Agent, Decision
from torchweft.rl.policies import DECISIONS


class Lying:
    """A policy for observers one of which asks, after its first step, with another shape."""

    def __init__(self, agent: rpc.RRef[Agent], name: str) -> None:
        self._agent = agent
        self._name = name

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        if rpc.get_worker_info().name == self._name and environments[0, DECISIONS]:
            observations = observations[:, :2]
        found: Decision = self._agent.rpc_sync().act(observations, environments)
        return found
