"""MAML: finds parameters from which a few gradient steps on a few examples fit a new task.

For each task, gradient steps on its *support* examples lead from the parameters that all tasks
share to adapted ones, which are judged on the task's *query* examples. The shared parameters are
trained on the mean of the query losses, so its gradient goes back through the steps. First-order
MAML takes the gradients within the steps for constants. (Finn, Abbeel and Levine 2017,
arXiv 1703.03400.)

Everything here is a pure function of parameters and task numbers, so it does not matter where it
runs, or how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Parameters = dict[str, Tensor]


class Task(NamedTuple):
    """A few examples to adapt to, and others of the same task to be judged on."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


class Problem(Protocol):
    """A family of tasks, and how a network adapts to one of them; a dataclass.

    Attributes:
        inner_rate: Rate of the inner steps.
        inner_steps: How many there are in training.
        score_name: What the score is called.
        higher_is_better: Whether a high score is a good one.
    """

    inner_rate: float
    inner_steps: int
    score_name: ClassVar[str]
    higher_is_better: ClassVar[bool]

    def make_network(self) -> nn.Module:
        """Returns an untrained network, of torch's own random numbers."""

    def make_task(self, seed: int) -> Task:
        """Returns the task of a number: the same one whenever and wherever it is made."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns what gradient steps make smaller, as a mean over examples."""

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns what people want to know, as a mean over examples."""


def query_loss(model: nn.Module, seeds: Tensor, problem: Problem, first_order: bool) -> Tensor:
    """Returns the mean query loss of some tasks, each after its own inner steps.

    Tasks are made where they are needed, so only their numbers travel.

    Args:
        model: The network, with the parameters that all tasks share.
        seeds: Numbers of the tasks, shape ``(tasks,)``.
        problem: What kind of tasks they are.
        first_order: Whether gradients within the steps are constants.
    """
    shared = dict(model.named_parameters())

    def loss_of(task: Task) -> Tensor:
        adapted = shared
        for _ in range(problem.inner_steps):
            adapted = inner_step(model, adapted, task, problem, first_order)
        return problem.loss(functional_call(model, adapted, task.query_x), task.query_y)

    return vmap(loss_of)(make_tasks(problem, seeds, model)).mean()


def inner_step(
    model: nn.Module, parameters: Parameters, task: Task, problem: Problem, first_order: bool
) -> Parameters:
    """Returns the parameters after one gradient step on the support examples of a task."""

    def support_loss(parameters: Parameters) -> Tensor:
        return problem.loss(functional_call(model, parameters, task.support_x), task.support_y)

    place = {name: p.detach() for name, p in parameters.items()} if first_order else parameters
    gradients = grad(support_loss)(place)
    return {name: p - problem.inner_rate * gradients[name] for name, p in parameters.items()}


def query_scores(model: nn.Module, seeds: Tensor, problem: Problem, steps: int) -> Tensor:
    """Returns the query scores of tasks before and after each of some inner steps.

    No graph is kept. The result has shape ``(tasks, steps + 1)``.
    """
    shared = {name: p.detach() for name, p in model.named_parameters()}

    def scores_of(task: Task) -> Tensor:
        adapted, scores = shared, []
        for step in range(steps + 1):
            output = functional_call(model, adapted, task.query_x)
            scores.append(problem.score(output, task.query_y))
            if step < steps:
                adapted = inner_step(model, adapted, task, problem, first_order=True)
        return torch.stack(scores)

    return vmap(scores_of)(make_tasks(problem, seeds, model))


def make_tasks(problem: Problem, seeds: Tensor, model: nn.Module) -> Task:
    """Makes tasks of the model's dtype; every tensor has a first dimension for the tasks."""
    dtype = next(model.parameters()).dtype
    made = (problem.make_task(seed) for seed in seeds.tolist())
    return Task(*(_stack(column, dtype) for column in zip(*made, strict=True)))


def _stack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    stacked = torch.stack(tensors)
    return stacked.to(dtype) if stacked.is_floating_point() else stacked
