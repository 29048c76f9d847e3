"""What an asynchronous pipeline computes, in one process: a loop that keeps every version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Version = dict[str, Tensor]
Rule = Callable[[int, int], int]
"""Returns the version that a stage uses for a minibatch."""


def updated(newest: Version, gradients: Sequence[Sequence[Tensor]], rate: float) -> Version:
    """Returns the version after a step of SGD with the mean of some minibatches' gradients."""
    means = [sum(column[1:], column[0]) / len(column) for column in zip(*gradients, strict=True)]
    return {
        name: value - rate * mean for (name, value), mean in zip(newest.items(), means, strict=True)
    }


def replay(
    stages: Sequence[nn.Module],
    loss_of: Callable[[list[Callable[..., Any]], Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    used: Rule,
    periods: Sequence[int],
    rate: float,
) -> tuple[list[Version], list[float]]:
    """Trains with SGD.

    Args:
        stages: The stages, which are not changed.
        loss_of: Returns the loss of a batch and a target, with functions that run the stages.
        batches: The minibatches.
        used: The rule.
        periods: For each stage, the number of minibatches of an update.
        rate: The learning rate.

    Returns:
        The last version of each stage, and the losses.
    """
    versions: list[list[Version]] = [
        [{name: weight.detach().clone() for name, weight in stage.named_parameters()}]
        for stage in stages
    ]
    pending: list[list[Sequence[Tensor]]] = [[] for _ in stages]
    losses = []
    given = list(batches)
    for number, (batch, target) in enumerate(given):
        leaves = [
            {name: value.clone().requires_grad_() for name, value in each[used(s, number)].items()}
            for s, each in enumerate(versions)
        ]
        loss = loss_of([_runs(*pair) for pair in zip(stages, leaves, strict=True)], batch, target)
        loss.backward()
        losses.append(loss.item())
        for s, each in enumerate(leaves):
            pending[s].append([leaf.grad for leaf in each.values() if leaf.grad is not None])
            if (number + 1) % periods[s] == 0 or number == len(given) - 1:
                versions[s].append(updated(versions[s][-1], pending[s], rate))
                pending[s].clear()
    return [each[-1] for each in versions], losses


def _runs(stage: nn.Module, leaves: Version) -> Callable[..., Any]:
    return lambda *args, **kwargs: functional_call(stage, leaves, args, kwargs)


class _Crossed(torch.autograd.Function):
    """A linear layer whose backward finds other weights than its forward used."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, later: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, later)
        return inputs @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, later = ctx.saved_tensors
        return gradient @ later, gradient.T @ inputs, None


def replay_without_versions(
    stages: Sequence[nn.Sequential],
    batches: Iterable[tuple[Tensor, Tensor]],
    used: Rule,
    period: int,
    rate: float,
) -> list[Version]:
    """Trains as ``replay`` does, but each backward finds the newest weights.

    Args:
        stages: Each a linear layer, and Tanh after it in all but the last.
    """
    versions: list[list[Version]] = [
        [{name: weight.detach().clone() for name, weight in stage.named_parameters()}]
        for stage in stages
    ]
    pending: list[list[Sequence[Tensor]]] = [[] for _ in stages]
    for number, (batch, target) in enumerate(batches):
        hidden, leaves = batch, []
        for s, each in enumerate(versions):
            weight, bias = (v.clone().requires_grad_() for v in each[used(s, number)].values())
            hidden = _Crossed.apply(hidden, weight, each[-1]["0.weight"]) + bias
            hidden = hidden if s == len(stages) - 1 else torch.tanh(hidden)
            leaves.append((weight, bias))
        nn.functional.cross_entropy(hidden, target).backward()
        for s, pair in enumerate(leaves):
            pending[s].append([leaf.grad for leaf in pair if leaf.grad is not None])
            if (number + 1) % period == 0:
                versions[s].append(updated(versions[s][-1], pending[s], rate))
                pending[s].clear()
    return [each[-1] for each in versions]
