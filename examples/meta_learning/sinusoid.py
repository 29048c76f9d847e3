"""Sine waves: each task is to fit one wave from ten of its points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from maml import Task
from torch import Tensor, nn

LEFT, RIGHT = -5.0, 5.0


@dataclass(frozen=True)
class Sinusoids:
    """Waves of any amplitude from 0.1 to 5 and any phase from 0 to pi, on [-5, 5].

    Attributes:
        shots: Points to adapt to; the query has as many other points.
        hidden: Width of the network's two hidden layers.
        inner_rate: Learning rate of the inner steps.
        inner_steps: Number of inner steps in training.
    """

    score_name: ClassVar[str] = "mean squared error"
    higher_is_better: ClassVar[bool] = False

    shots: int = 10
    hidden: int = 40
    inner_rate: float = 0.01
    inner_steps: int = 1

    def make_network(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 1),
        )

    def make_task(self, seed: int) -> Task:
        generator = torch.Generator().manual_seed(seed)
        amplitude, phase = draw_wave(generator)
        x = LEFT + (RIGHT - LEFT) * torch.rand(2 * self.shots, 1, generator=generator)
        y = amplitude * torch.sin(x - phase)
        return Task(x[: self.shots], y[: self.shots], x[self.shots :], y[self.shots :])

    def make_curve(self, seed: int, x: Tensor) -> Tensor:
        """Returns the values at ``x`` of the wave of task ``seed``."""
        amplitude, phase = draw_wave(torch.Generator().manual_seed(seed))
        return amplitude * torch.sin(x - phase)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean squared error."""
        return nn.functional.mse_loss(output, target)

    score = loss


def draw_wave(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns an amplitude and a phase."""
    amplitude, phase = torch.rand(2, generator=generator)
    return 0.1 + 4.9 * amplitude, math.pi * phase
