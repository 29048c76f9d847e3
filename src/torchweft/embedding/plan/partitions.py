"""The number of servers that a table is best cut over, from measured steps.

More servers share the work on rows, but each adds a message: ``t(P) = b/P + a(P - 1) + c``, the
model of Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks"
(EuroSys 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from torchweft.errors import ConfigurationError

PARAMETERS = 3
"""The numbers of partitions that steps must be measured with, at least."""


class StepCost(NamedTuple):
    """The seconds of a step with P partitions: ``shared_s / P + message_s * (P - 1) + rest_s``.

    Attributes:
        shared_s: Work that the partitions share.
        message_s: Cost of each further partition.
        rest_s: Everything else.
    """

    shared_s: float
    message_s: float
    rest_s: float

    def step_s(self, partitions: int) -> float:
        """Returns the seconds of a step with a number of partitions."""
        return self.shared_s / partitions + self.message_s * (partitions - 1) + self.rest_s

    def best(self, limit: int) -> int:
        """Returns the number of partitions, from 1 to ``limit``, with the shortest step."""
        if self.message_s <= 0:
            return limit if self.shared_s > 0 else min((1, limit), key=self.step_s)
        lowest = math.sqrt(max(self.shared_s, 0.0) / self.message_s)
        near = {math.floor(lowest), math.ceil(lowest)}
        return min(sorted(min(max(each, 1), limit) for each in near), key=self.step_s)


def fit_step_cost(measured: Iterable[tuple[int, float]]) -> StepCost:
    """Fits the model to measured steps, by least squares.

    Args:
        measured: Pairs of a number of partitions and the seconds of a step; any number of each.

    Raises:
        ConfigurationError: There are fewer than three different numbers of partitions, or a
            number is below 1.
    """
    pairs = list(measured)
    counts = {partitions for partitions, _ in pairs}
    if len(counts) < PARAMETERS or min(counts) < 1:
        raise ConfigurationError(
            f"steps were measured with {sorted(counts)} partitions; the model needs at least "
            f"{PARAMETERS} different numbers, from 1 on"
        )
    system = torch.tensor([[1 / p, p - 1, 1] for p, _ in pairs], dtype=torch.float64, device="cpu")
    times = torch.tensor([[seconds] for _, seconds in pairs], dtype=torch.float64, device="cpu")
    shared, message, rest = torch.linalg.lstsq(system, times).solution.view(-1).tolist()
    return StepCost(shared, message, rest)
