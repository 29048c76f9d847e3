"""Trains and tests over workers; contains the meta-step.

``train.py`` is the program that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from maml import Problem, query_loss, query_scores
from torch import nn

from torchweft import autograd, mapreduce

META_RATE = 1e-3
TESTS = 20
TESTED_TASKS = 600
FIRST_TESTED = 2**31
"""Tasks from this number on are for tests; training draws from the numbers below."""
COMPARED_STEPS = 50
SCRATCH_RATES = (0.3, 1.0, 3.0, 10.0)
"""Rates to try for training from scratch, in units of the inner rate."""


@dataclass(frozen=True)
class Schedule:
    """The training schedule.

    Attributes:
        iterations: Meta-steps; each is one step of the parameters that all tasks share.
        tasks: Tasks in a meta-step.
        first_order: Whether to treat gradients within the inner steps as constants.
        one_by_one: Whether each task is a separate part, instead of one part for each worker.
        seed: Seed of the random choice of tasks.
        held_out: Tasks to test with.
    """

    iterations: int
    tasks: int
    first_order: bool = False
    one_by_one: bool = False
    seed: int = 0
    held_out: int = TESTED_TASKS


@dataclass(frozen=True)
class Test:
    """The score of held-out tasks after a number of meta-steps, before and after inner steps."""

    iteration: int
    before: float
    after: float


@dataclass
class History:
    """The record of a training run.

    Attributes:
        losses: The query loss of each meta-step.
        tests: Scores of held-out tasks, at intervals and at the end.
    """

    losses: list[float] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Mean scores of held-out tasks, before the inner steps and after each of them.

    Attributes:
        trained: From the meta-trained parameters.
        scratch: From untrained parameters.
        scratch_rate: Learning rate of the steps from scratch: the best of several.
    """

    trained: list[float]
    scratch: list[float]
    scratch_rate: float


def train(
    model: nn.Module,
    problem: Problem,
    tested: Problem,
    schedule: Schedule,
    workers: Sequence[str],
    history: History,
) -> None:
    """Trains the parameters that all tasks share; without workers, in this process alone.

    In each meta-step every worker adapts the parameters to its share of the tasks. The gradient of
    the mean loss flows back through the workers' inner steps into ``.grad`` of the parameters here.
    """
    shares = mapreduce.dim_partitioner(0, exclusive=schedule.one_by_one, workers=workers or None)
    optimizer = torch.optim.Adam(model.parameters(), lr=META_RATE)
    generator = torch.Generator().manual_seed(schedule.seed)
    with mapreduce.progress(total=schedule.iterations, label="meta-step") as shown:
        for iteration in range(schedule.iterations):
            if iteration % max(1, schedule.iterations // TESTS) == 0:
                add_test(history, model, tested, workers, schedule.held_out)
            seeds = torch.randint(FIRST_TESTED, (schedule.tasks,), generator=generator)
            optimizer.zero_grad()
            if workers:
                with autograd.context() as context_id:
                    loss = mapreduce.remote_sync_call(
                        query_loss,
                        args=(model, seeds, problem, schedule.first_order),
                        partitioner=shares,
                        reducer=mapreduce.mean_reducer,
                    )
                    mapreduce.autograd.backward(context_id, loss)
            else:
                loss = query_loss(model, seeds, problem, schedule.first_order)
                loss.backward()
            optimizer.step()
            history.losses.append(loss.item())
            shown.step(loss=history.losses[-1], held_out=history.tests[-1].after)
        add_test(history, model, tested, workers, schedule.held_out)


def add_test(
    history: History, model: nn.Module, tested: Problem, workers: Sequence[str], tasks: int
) -> None:
    """Records how well the model adapts to held-out tasks, in as many steps as in training."""
    scores = test_scores(model, tested, workers, tasks, tested.inner_steps)
    history.tests.append(Test(len(history.losses), scores[0], scores[-1]))


def test_scores(
    model: nn.Module, tested: Problem, workers: Sequence[str], tasks: int, steps: int
) -> list[float]:
    """Returns the mean score of held-out tasks, before the inner steps and after each of them."""
    seeds = torch.arange(FIRST_TESTED, FIRST_TESTED + tasks)
    arguments = (model, seeds, tested, steps)
    if workers:
        scores = mapreduce.remote_sync_call(
            query_scores,
            args=arguments,
            partitioner=mapreduce.dim_partitioner(0, workers=workers),
            reducer=torch.cat,
        )
    else:
        scores = query_scores(*arguments)
    mean: list[float] = scores.mean(dim=0).tolist()
    return mean


def compare(
    model: nn.Module, untrained: nn.Module, tested: Problem, workers: Sequence[str], tasks: int
) -> Comparison:
    """Compares adaptation to held-out tasks from trained and from untrained parameters."""
    trained = test_scores(model, tested, workers, tasks, COMPARED_STEPS)
    rates = [factor * tested.inner_rate for factor in SCRATCH_RATES]
    from_scratch = [
        test_scores(untrained, replace(tested, inner_rate=rate), workers, tasks, COMPARED_STEPS)
        for rate in rates
    ]
    sign = 1 if tested.higher_is_better else -1
    best = max(range(len(rates)), key=lambda place: sign * from_scratch[place][-1])
    return Comparison(trained, from_scratch[best], rates[best])
