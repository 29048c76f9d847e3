"""Tests the meta-learning example: its tasks, inner steps and command-line options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import ITERATIONS, TASKS, parse_options
from digits import HELD_OUT, TRAINED, Digits, images_by_digit
from maml import Problem, inner_step, make_tasks, query_loss, query_scores
from sinusoid import LEFT, RIGHT, Sinusoids
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


def test_the_second_order_is_the_derivative() -> None:
    problem = PROBLEMS[0]
    model = network(problem)
    gradient = gradients_of(query_loss(model, SEEDS, problem, first_order=False), model)
    direction = torch.randn(len(gradient), dtype=torch.float64)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def loss_at(distance: float) -> Tensor:
        moved = weights + distance * direction
        torch.nn.utils.vector_to_parameters(moved, model.parameters())
        return query_loss(model, SEEDS, problem, first_order=False).detach()

    difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    assert torch.allclose(gradient @ direction, difference, rtol=1e-6)


@each_problem
def test_a_task_is_the_same_wherever_it_is_made(problem: Problem) -> None:
    model = network(problem)
    together = make_tasks(problem, SEEDS, model)
    for place, seed in enumerate(SEEDS):
        alone = make_tasks(problem, seed.view(1), model)
        assert all(torch.equal(a[0], b[place]) for a, b in zip(alone, together, strict=True))
    assert not torch.equal(together.support_x[0], together.support_x[1])


@each_problem
def test_scores_begin_with_what_the_network_makes_of_the_query(problem: Problem) -> None:
    model = network(problem)
    scores = query_scores(model, SEEDS, problem, steps=2)
    assert scores.shape == (3, 3)
    assert not scores.requires_grad
    task = make_tasks(problem, SEEDS, model)
    first = problem.score(model(task.query_x[0]), task.query_y[0])
    assert torch.allclose(scores[0, 0], first)


def test_waves_are_in_their_range() -> None:
    problem = Sinusoids()
    for seed in range(50):
        task = problem.make_task(seed)
        assert task.support_x.shape == task.query_y.shape == (10, 1)
        assert LEFT <= float(task.support_x.min()) <= float(task.support_x.max()) <= RIGHT
        assert float(task.query_y.abs().max()) <= 5
        assert torch.allclose(problem.make_curve(seed, task.query_x), task.query_y)


def test_held_out_digits_are_in_no_task_of_the_training() -> None:
    assert sorted((*TRAINED, *HELD_OUT)) == list(range(10))
    problem = Digits(turned=False)
    known = {image.numpy().tobytes() for digit in TRAINED for image in images_by_digit()[digit]}
    for seed in range(20):
        task = problem.make_task(seed)
        assert all(image.numpy().tobytes() in known for image in task.query_x)
        tested = replace(problem, classes=HELD_OUT).make_task(seed)
        assert not any(image.numpy().tobytes() in known for image in tested.query_x)


def test_a_task_of_digits_has_each_of_them_as_often() -> None:
    task = Digits().make_task(5)
    assert task.support_y.tolist() == [0, 1, 2]
    assert task.query_y.bincount().tolist() == [5, 5, 5]
    assert task.support_x.shape == (3, 1, 8, 8)


def test_a_step_goes_down() -> None:
    problem = Sinusoids()
    model = network(problem)
    task = problem.make_task(1)
    doubles = type(task)(*(tensor.double() for tensor in task))
    before = dict(model.named_parameters())
    after = inner_step(model, before, doubles, problem, first_order=True)

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        output = functional_call(model, parameters, doubles.support_x)
        return problem.loss(output, doubles.support_y)

    assert loss_of(after) < loss_of(before)


def test_options_have_the_defaults_of_their_problem() -> None:
    options = parse_options(["digits", "--first-order", "--out", "x"])
    assert options.schedule.iterations == ITERATIONS["digits"]
    assert options.schedule.tasks == TASKS["digits"]
    assert options.schedule.first_order
    assert (options.workers, options.out) == (2, Path("x"))


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
