"""Tests the meta-learning example: its tasks, inner steps and command-line options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from command import parse_options
from digits import HELD_OUT, TRAINED, Digits, images_by_digit
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


@each_problem
def test_a_task_is_the_same_wherever_it_is_made(problem: Problem) -> None:
    model = network(problem)
    together = make_tasks(problem, SEEDS, model)
    for place, seed in enumerate(SEEDS):
        alone = make_tasks(problem, seed.view(1), model)
        assert all(torch.equal(a[0], b[place]) for a, b in zip(alone, together, strict=True))
    assert not torch.equal(together.support_x[0], together.support_x[1])


def test_held_out_digits_are_in_no_task_of_the_training() -> None:
    assert sorted((*TRAINED, *HELD_OUT)) == list(range(10))
    problem = Digits(turned=False)
    known = {image.numpy().tobytes() for digit in TRAINED for image in images_by_digit()[digit]}
    for seed in range(20):
        task = problem.make_task(seed)
        assert all(image.numpy().tobytes() in known for image in task.query_x)
        tested = replace(problem, classes=HELD_OUT).make_task(seed)
        assert not any(image.numpy().tobytes() in known for image in tested.query_x)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["waves"], "invalid choice: 'waves'"),
        (["digits", "--workers", "-1"], "-1 is not a whole number from 0 up"),
        (["digits", "--tasks", "x"], "x is not a whole number from 1 up"),
        ([], "problem"),
    ],
)
def test_what_cannot_be_meant_is_told_in_a_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
