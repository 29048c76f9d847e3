"""MAML: finds parameters from which a few gradient steps on a few examples fit a new task.

For each task, gradient steps on its *support* examples lead from the parameters that all tasks
share to adapted parameters, which are evaluated on the task's *query* examples. The shared
parameters are trained on the mean of the query losses, so its gradient passes back through the
steps. First-order MAML treats the gradients within the steps as constants. (Finn, Abbeel and
Levine 2017, arXiv 1703.03400.)

All functions here are pure functions of parameters and task numbers, so they may run on any worker
and any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Parameters = dict[str, Tensor]


class Task(NamedTuple):
    """Examples to adapt to (support), and examples of the same task to evaluate on (query)."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


class Problem(Protocol):
    """A family of tasks, and how a network adapts to one of them; a dataclass.

    Attributes:
        inner_rate: Learning rate of the inner steps.
        inner_steps: Number of inner steps in training.
        score_name: Name of the score.
        higher_is_better: Whether a higher score is better.
    """

    inner_rate: float
    inner_steps: int
    score_name: ClassVar[str]
    higher_is_better: ClassVar[bool]

    def make_network(self) -> nn.Module:
        """Returns an untrained network, initialized from torch's global random numbers."""

    def make_task(self, seed: int) -> Task:
        """Returns the task with this number: the same task on every call and every worker."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the loss that gradient steps minimize, as a mean over examples."""

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the score to report, as a mean over examples."""


def query_loss(model: nn.Module, seeds: Tensor, problem: Problem, first_order: bool) -> Tensor:
    """Returns the mean query loss of the tasks, each after its own inner steps.

    Each worker makes its tasks from their numbers, so only the numbers are sent.

    Args:
        model: The network, with the parameters that all tasks share.
        seeds: Numbers of the tasks, shape ``(tasks,)``.
        problem: The family of the tasks.
        first_order: Whether to treat gradients within the steps as constants.
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
    """Returns the query scores of tasks, before the inner steps and after each of them.

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
    """Makes tasks of the model's dtype; the first dimension of every tensor is the task."""
    dtype = next(model.parameters()).dtype
    made = (problem.make_task(seed) for seed in seeds.tolist())
    return Task(*(_stack(column, dtype) for column in zip(*made, strict=True)))


def _stack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    stacked = torch.stack(tensors)
    return stacked.to(dtype) if stacked.is_floating_point() else stacked
