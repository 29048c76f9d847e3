"""Sinusoid regression by MAML: functions for the parts of a map, and deaths of workers in them.

A task is drawn from its seed alone, so it is the same wherever and however often it is run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchweft import rpc

NETWORK_SEED = 7
UNITS = 40
SHOTS = 10
STEPS = 3
RATE = 0.03

Weights = dict[str, Tensor]
Gradients = Callable[[Weights], Sequence[Tensor]]
"""Takes the weights before an inner step; returns the gradients of the inner loss."""


# Deaths


class Death(NamedTuple):
    """Where a worker dies.

    Attributes:
        worker: Its name.
        point: ``begin`` (of a part), ``end`` (of a part), ``backward`` (the gradient of a part's
            result arrives) or ``gradient`` (the last gradient of a part is computed); in a part of
            the inner loop ``inner begin`` or ``inner backward``.
    """

    worker: str
    point: str


class Doom(NamedTuple):
    """Deaths of workers, one after the other.

    Attributes:
        folder: Has a file for each death so far.
        deaths: Each death comes only after the deaths before it.
    """

    folder: str
    deaths: tuple[Death, ...] = ()

    def so_far(self) -> int:
        """Returns the number of deaths so far."""
        return len(os.listdir(self.folder))

    def strike(self, point: str) -> None:
        """Kills this process if the next death is that of this worker at ``point``."""
        if not self.deaths:
            return
        count = self.so_far()
        if self.deaths[count : count + 1] == ((rpc.get_worker_info().name, point),):
            Path(self.folder, str(count)).touch()
            os.kill(os.getpid(), signal.SIGKILL)


NOBODY = Doom("")


class Mortal(torch.autograd.Function):
    """The identity; ``doom`` may kill the worker when the gradient arrives."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, doom: Doom, point: str) -> Tensor:
        ctx.doom, ctx.point = doom, point
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.doom.strike(ctx.point)
        return gradient.clone(), None, None


def mortal(value: Tensor, doom: Doom, point: str) -> Tensor:
    made: Tensor = Mortal.apply(value, doom, point)  # type: ignore[no-untyped-call]
    return made


# Tasks


def network() -> nn.Sequential:
    """Returns a network of 1-40-40-1 units, the same each time."""
    torch.manual_seed(NETWORK_SEED)
    return nn.Sequential(
        nn.Linear(1, UNITS),
        nn.ReLU(),
        nn.Linear(UNITS, UNITS),
        nn.ReLU(),
        nn.Linear(UNITS, 1),
    ).double()


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Returns a sinusoid as inputs and values, (2, SHOTS, 1) each: support and query set."""
    generator = torch.Generator().manual_seed(seed)
    amplitude, phase = torch.rand(2, generator=generator, dtype=torch.float64)
    inputs = torch.rand(2, SHOTS, 1, generator=generator, dtype=torch.float64) * 10 - 5
    return inputs, (0.1 + 4.9 * amplitude) * torch.sin(inputs - torch.pi * phase)


def error(model: nn.Module, weights: Mapping[str, Tensor], inputs: Tensor, goals: Tensor) -> Tensor:
    difference: Tensor = functional_call(model, dict(weights), (inputs,)) - goals
    return difference.square().mean()


def descended(weights: Weights, gradients: Gradients) -> Weights:
    """Returns weights after the inner loop."""
    for _ in range(STEPS):
        steps = zip(weights.items(), gradients(weights), strict=True)
        weights = {name: value - RATE * gradient for (name, value), gradient in steps}
    return weights


def query_error(model: nn.Module, weights: Weights, seed: int, is_second_order: bool) -> Tensor:
    """Returns the error of the adapted model; ``is_second_order`` keeps the inner loop's graph."""
    inputs, goals = draw(seed)

    def gradients(weights: Weights) -> Sequence[Tensor]:
        inner = error(model, weights, inputs[0], goals[0])
        return torch.autograd.grad(inner, list(weights.values()), create_graph=is_second_order)

    return error(model, descended(weights, gradients), inputs[1], goals[1])


def mean_query_error(
    model: nn.Module, seeds: Tensor, is_second_order: bool, doom: Doom = NOBODY
) -> Tensor:
    """Returns the mean query error over the tasks of a part; ``doom`` may kill the worker."""
    doom.strike("begin")
    weights: Weights = dict(model.named_parameters())
    first = next(iter(weights))
    weights[first] = mortal(weights[first], doom, "gradient")
    errors = [query_error(model, weights, int(seed), is_second_order) for seed in seeds]
    doom.strike("end")
    return mortal(torch.stack(errors).mean(), doom, "backward")
