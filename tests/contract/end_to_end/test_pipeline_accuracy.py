"""Accuracy of models that an asynchronous pipeline trains, beside those of synchronous training."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import Descent
from tests.thorough import THOROUGH
from torchweft.pipeline import Pipe, SchedulePipeDream

WORKERS = ["worker0", "worker1", "worker2", "worker3"]
N_TESTED = 360
N_EPOCHS = 40
SIZE = 32
RATE = 0.02
WIDTH = 64
POINTS = 0.02
cross_entropy = nn.functional.cross_entropy
OPTIMIZER: Any = functools.partial(Descent, rate=RATE)
# 2BW steps once for four minibatches: their sum makes a step as long as four of the others.
RULES = [("stashing", "mean"), ("vertical-sync", "mean"), ("2bw", "sum")]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Returns images, shape (1797, 64), normalized and in a random order, and their digits."""
    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32)
    images = (images - images.mean(0)) / (images.std(0) + 1e-6)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(found.target)[order]


def minibatches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the images to train on, in a new order in each epoch."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    for _ in range(N_EPOCHS):
        order = torch.randperm(len(images) - N_TESTED, generator=generator) + N_TESTED
        for part in order.split(SIZE):
            if len(part) == SIZE:
                yield images[part], labels[part]


def perceptron() -> nn.Sequential:
    """Returns a chain of four layers."""
    torch.manual_seed(0)
    sizes = [64, WIDTH, WIDTH, WIDTH]
    hidden = [nn.Sequential(nn.Linear(size, WIDTH), nn.ReLU()) for size in sizes[:-1]]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def accuracy(model: nn.Sequential) -> float:
    images, labels = digits()
    with torch.no_grad():
        found = model(images[:N_TESTED]).argmax(dim=1)
    return (found == labels[:N_TESTED]).float().mean().item()


def trained_alone(model: nn.Sequential) -> nn.Sequential:
    """Trains a copy in this process, one minibatch after the other."""
    model = copy.deepcopy(model)
    optimizer = OPTIMIZER(list(model.parameters()))
    for batch, target in minibatches():
        model.zero_grad()
        cross_entropy(model(batch), target).backward()
        optimizer.step()
    return model


def trained_by(pipe: Pipe, model: nn.Sequential) -> tuple[nn.Sequential, Sequence[float]]:
    losses = [loss.item() for loss in pipe.run(minibatches())]
    model = copy.deepcopy(model)
    model.load_state_dict(pipe.state_dict())
    return model, losses


@pytest.mark.thorough
def test_a_pipeline_that_does_not_wait_learns_as_well() -> None:
    model = perceptron()
    synchronous = accuracy(trained_alone(model))
    assert synchronous > 0.93
    with torchweft.cluster(workers=4):
        for weights, reduction in RULES if THOROUGH else RULES[:1]:
            schedule = SchedulePipeDream(weights=weights)
            with Pipe(
                copy.deepcopy(model),
                WORKERS,
                schedule,
                cross_entropy,
                optimizer=OPTIMIZER,
                reduction=reduction,  # type: ignore[arg-type]
            ) as pipe:
                found, losses = trained_by(pipe, model)
            assert len(losses) == N_EPOCHS * ((len(digits()[0]) - N_TESTED) // SIZE)
            print(f"{weights}: {accuracy(found):.4f}; synchronous: {synchronous:.4f}")
            assert accuracy(found) == pytest.approx(synchronous, abs=POINTS)
