"""Stages for the tests of pipelines, and the same models in one process."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.pipeline import BATCH, Take, Wiring

WIDTH = 6


class Residual(nn.Module):
    """A block with a skip connection inside."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.outer(torch.tanh(self.inner(self.norm(inputs))))


def layers(count: int, seed: int = 0) -> nn.Sequential:
    """Returns a chain of blocks in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, WIDTH), *[Residual() for _ in range(count - 1)]).double()


class Embed(nn.Module):
    """The first stage of a small transformer; its weight is tied with the last stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, WIDTH, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.embedding(tokens, self.weight)
        return {"hidden": hidden, "first": hidden.mean(-1, keepdim=True)}


class Rotated(nn.Module):
    """A block that needs the positions of the batch, as one with rotary embeddings does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[..., None]
        turned = hidden * angle.cos() + hidden.roll(1, -1) * angle.sin()
        return hidden + torch.tanh(self.mix(turned)), turned


class Head(nn.Module):
    """The last stage: the tied weight, and values of three other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, WIDTH, dtype=torch.float64))

    def forward(self, hidden: Tensor, turned: Tensor, *, first: Tensor) -> Tensor:
        return (hidden * first + turned) @ self.weight.T


TRANSFORMER = Wiring.checked(
    [
        [Take(BATCH, "tokens")],
        [Take(0, "hidden"), Take(BATCH, "positions")],
        [Take(1, 0), Take(BATCH, "positions")],
        [Take(2, 0), Take(1, 1), Take(0, "first", "first")],
    ]
)
TIES = (((0, "weight"), (3, "weight")),)


def transformer(seed: int = 0) -> list[nn.Module]:
    """Returns the stages of a transformer with skip connections and a tied weight."""
    torch.manual_seed(seed)
    stages: list[nn.Module] = [Embed(), Rotated(), Rotated(), Head()]
    assert isinstance(stages[0], Embed)
    assert isinstance(stages[3], Head)
    stages[3].weight = stages[0].weight
    return stages


def run_transformer(stages: Sequence[Any], batch: dict[str, Tensor]) -> Tensor:
    """Runs a transformer in this process."""
    embedded = stages[0](batch["tokens"])
    hidden, turned = stages[1](embedded["hidden"], batch["positions"])
    hidden, _ = stages[2](hidden, batch["positions"])
    result: Tensor = stages[3](hidden, turned, first=embedded["first"])
    return result


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy over all positions."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def made(seed: int, stage: int) -> nn.Module:
    """Makes one stage of a transformer, with a tied weight of its own."""
    stages = transformer(seed)
    if stage == 3:
        stages[3].weight = nn.Parameter(torch.zeros(11, WIDTH, dtype=torch.float64))
    return stages[stage]


def makers(seed: int) -> list[Callable[[], nn.Module]]:
    """Returns functions that make the stages of a transformer on their workers."""
    return [functools.partial(made, seed, stage) for stage in range(4)]


class Failing(nn.Module):
    """A stage that raises if a first feature is far below 0, and dies if one is far above."""

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs[:, 0] < -100).any()):
            raise ArithmeticError("a negative input")
        if bool((inputs[:, 0] > 100).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


class Slow(nn.Module):
    """A stage that takes some time for positive inputs.

    Args:
        duration_s: How long, in seconds.
    """

    def __init__(self, duration_s: float) -> None:
        super().__init__()
        self.duration_s = duration_s

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs > 0).any()):
            time.sleep(self.duration_s)
        return inputs


class Descent(torch.optim.Optimizer):
    """Gradient descent.

    Args:
        weights: The weights.
        rate: The learning rate.
    """

    def __init__(self, weights: Sequence[Tensor], rate: float = 0.01) -> None:
        super().__init__(weights, {})
        self.rate = rate

    def step(self) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            assert weight.grad is not None
            weight.data.sub_(weight.grad, alpha=self.rate)
