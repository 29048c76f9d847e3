"""Tests the inner steps of the meta-learning example."""

from __future__ import annotations

import pytest
import torch
from digits import Digits
from maml import Problem, make_tasks, query_loss
from sinusoid import Sinusoids
from torch import Tensor, nn
from torch.func import functional_call

PROBLEMS: list[Problem] = [Sinusoids(hidden=5, inner_steps=2, inner_rate=0.05), Digits()]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=["sinusoid", "digits"])
SEEDS = torch.tensor([3, 11, 12])


def network(problem: Problem) -> nn.Module:
    torch.manual_seed(0)
    # Smooth activations: finite differences are compared with derivatives.
    layers = [nn.Tanh() if isinstance(each, nn.ReLU) else each for each in problem.make_network()]  # type: ignore[attr-defined]
    return nn.Sequential(*layers).double()


def one_by_one(model: nn.Module, problem: Problem, seeds: Tensor, first_order: bool) -> Tensor:
    """Returns the mean query loss, computed with torch.autograd in a loop over tasks."""
    losses = []
    tasks = make_tasks(problem, seeds, model)
    for place in range(len(seeds)):
        support_x, support_y, query_x, query_y = (tensor[place] for tensor in tasks)
        adapted = dict(model.named_parameters())
        for _ in range(problem.inner_steps):
            loss = problem.loss(functional_call(model, adapted, support_x), support_y)
            gradients = torch.autograd.grad(
                loss, tuple(adapted.values()), create_graph=not first_order, retain_graph=True
            )
            pairs = zip(adapted.items(), gradients, strict=True)
            adapted = {name: p - problem.inner_rate * gradient for (name, p), gradient in pairs}
        losses.append(problem.loss(functional_call(model, adapted, query_x), query_y))
    return torch.stack(losses).mean()


def gradients_of(loss: Tensor, model: nn.Module) -> Tensor:
    parts = torch.autograd.grad(loss, tuple(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


@each_problem
@pytest.mark.parametrize("first_order", [False, True])
def test_gradients_are_those_of_a_loop(problem: Problem, first_order: bool) -> None:
    model = network(problem)
    loss = query_loss(model, SEEDS, problem, first_order)
    expected = one_by_one(model, problem, SEEDS, first_order)
    assert torch.allclose(loss, expected, rtol=1e-12)
    found, wanted = gradients_of(loss, model), gradients_of(expected, model)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
