"""Pipelines whose stages move to other workers, and their snapshots."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import WIDTH, layers
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    SchedulePipeDream,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
TINY = 1e-12
mse = nn.functional.mse_loss


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)


def test_an_asynchronous_pipeline_moves_between_runs() -> None:
    model = layers(4)

    def sgd(trained: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)

    def losses(schedule: Any, workers: list[str], moved: bool) -> list[float]:
        with Pipe(model, WORKERS[:1], SchedulePipeDream(), mse, optimizer=sgd) as pipe:
            found = [float(each) for each in pipe.run([batch(0), batch(1)])]
            if moved:
                pipe.repartition(model, workers=workers, schedule=schedule)
            return (
                found
                + [float(pipe(batch(9)[0]).sum())]
                + [float(each) for each in pipe.run([batch(2)])]
            )

    stayed = losses(None, WORKERS[:1], False)
    assert losses(None, WORKERS[1:3], True) == pytest.approx(stayed, abs=TINY)


def test_what_cannot_move_stays_as_it_was() -> None:
    model = layers(4)
    with Pipe(model, WORKERS[:2], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        before = pipe.step(*batch(0))
        wrong: list[tuple[Any, str]] = [
            (
                {"stages": layers(5)},
                r"missing \['4\.inner\.bias', .*unexpected \[\]",
            ),
            ({"stages": nn.Sequential(nn.Linear(5, 6), *model[1:])}, "0.weight has shape"),
            ({"stages": model, "workers": WORKERS[:1] * 2}, "name each worker"),
            ({"stages": model, "schedule": SchedulePipeDream()}, "steps an optimizer"),
        ]
        for arguments, text in wrong:
            with pytest.raises(ConfigurationError, match=text):
                pipe.repartition(**arguments)
        optimizer.zero_grad()
        assert torch.equal(pipe.step(*batch(0)), before)
        with pipe.recording(), pytest.raises(ConfigurationError, match="recorded"):
            pipe.repartition(model)


def test_stages_of_another_type_are_refused() -> None:
    model = layers(4)
    with Pipe(model, WORKERS[:2], Schedule1F1B(4), mse) as pipe:
        pipe.optimizer(torch.optim.SGD, lr=0.1)
        single = copy.deepcopy(model).float()
        with pytest.raises(
            ConfigurationError, match=r"0.weight has type float64 there and float32"
        ):
            pipe.repartition(single)
        with pytest.raises(ConfigurationError, match=r"has type float32 there and float64 here"):
            pipe.load_state_dict(single.state_dict())
