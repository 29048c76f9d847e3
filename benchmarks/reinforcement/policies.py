"""The policy of the agents that are measured."""

from __future__ import annotations

from torch import Tensor

from torchweft.rl import LocalPolicy, categorical


class Sampling(LocalPolicy):
    """Samples actions from the network's logits."""

    def decide(
        self, observations: Tensor, draws: Tensor, states: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        actions, logs = categorical(self.network(observations), draws)
        return actions, {"logs": logs}, states
