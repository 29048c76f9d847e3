"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes.pipeline_models import WIDTH, layers
from tests.contract.processes.test_pipeline_moving import TINY, WORKERS, batch, mse
from torchweft.errors import ConfigurationError, SerializationError, StateMismatch
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
    cut_model,
    cut_sequential,
)
from torchweft.pipeline.host import Host

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


class Alone:
    """The same training in this process."""

    def __init__(self, model: nn.Module, make: Any, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = make(trained, **options)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        mse(self.model(inputs), target).backward()
        self.optimizer.step()


def train(pipe: Pipe, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        pipe.step(*batch(seed))
        optimizer.step()


def assert_same(pipe: Pipe, model: nn.Module) -> None:
    """Compares the weights on each worker with those of a model in this process."""
    expected = model.state_dict()
    for found in pipe._deployment.call_all(Host.values):
        for name, value in found.items():
            assert torch.allclose(value, expected[name], atol=TINY, rtol=0), name
    assert pipe.state_dict().keys() == expected.keys()


OPTIMIZERS = [(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01})]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_training_goes_on_as_before_on_other_stages_and_workers(make: Any, options: Any) -> None:
    model = layers(8)
    alone = Alone(model, make, **options)
    moves: list[tuple[Any, list[str], Any]] = [
        (model, ["worker1", "worker3"], None),  # fewer workers
        (cut_sequential(model, [1]), WORKERS, ScheduleGPipe(6, replicas=(1, 3))),  # replicas
        (cut_sequential(model, [5]), WORKERS, ScheduleGPipe(6, replicas=(2, 2))),
        (model, ["driver", "worker2"], ScheduleZBVZeroBubble(6)),  # two stages on each
        ([model], ["worker0"], ScheduleGPipe(2)),
    ]
    with Pipe(model, WORKERS, Schedule1F1B(6), mse) as pipe:
        optimizer = pipe.optimizer(make, **options)
        train(pipe, optimizer, 0, 1)
        alone.step(*batch(0))
        alone.step(*batch(1))
        for number, (stages, names, schedule) in enumerate(moves[:-1], 2):
            pipe.repartition(stages, workers=names, schedule=schedule)
            assert pipe.workers == tuple(names)
            assert_same(pipe, alone.model)
            train(pipe, optimizer, number)
            alone.step(*batch(number))
        assert_same(pipe, alone.model)


class Twice(nn.Module):
    """Uses a weight of its own after its first and its third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers(4)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, fourth = self.parts
        found: Tensor = fourth(third(second(first(inputs) @ self.shared)) @ self.shared)
        return found


def test_a_weight_of_two_stages_of_one_worker_is_stepped_and_moved_in_both() -> None:
    model = Twice()
    alone = Alone(model, torch.optim.Adam, lr=0.01)
    begins = {f"parts.{number}": SplitPoint.BEGINNING for number in range(1, 4)}
    shared, apart = cut_model(model, begins), cut_model(model, {"parts.2": SplitPoint.BEGINNING})
    with Pipe(shared, WORKERS[:2], ScheduleInterleaved1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        for seed, (stages, schedule) in enumerate(
            [
                (shared, ScheduleInterleaved1F1B(4)),
                (apart, Schedule1F1B(4)),
                (shared, ScheduleInterleaved1F1B(4)),
            ]
        ):
            pipe.repartition(stages, schedule=schedule)
            train(pipe, optimizer, 2 * seed, 2 * seed + 1)
            alone.step(*batch(2 * seed))
            alone.step(*batch(2 * seed + 1))
            assert_same(pipe, alone.model)


class Counting(nn.Module):
    """Counts its calls in further state, which is no tensor."""

    count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        return inputs

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_further_state_of_modules_moves_and_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(*layers(3), Counting())
    with Pipe(model, WORKERS[:2], Schedule1F1B(4), mse) as pipe:
        pipe.step(*batch(0))
        pipe.repartition(model, workers=WORKERS[1:])
        assert pipe.state_dict()["3._extra_state"] == {"count": 4}  # type: ignore[comparison-overlap]
        pipe.save(tmp_path, step=1)
        pipe.step(*batch(0))
        pipe.restore(tmp_path)
        assert pipe.state_dict()["3._extra_state"] == {"count": 4}  # type: ignore[comparison-overlap]


def test_hyper_parameters_of_schedulers_reach_the_workers_and_stay_after_a_move() -> None:
    model = layers(4)
    alone = Alone(model, torch.optim.SGD, lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(alone.optimizer, 0.5)
    with Pipe(model, WORKERS[:2], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(4):
            if seed == 2:
                pipe.repartition(model, workers=WORKERS[1:])
            train(pipe, optimizer, seed)
            scheduler.step()
            alone.step(*batch(seed))
            decay.step()
        assert_same(pipe, alone.model)
        assert optimizer.param_groups[0]["lr"] == alone.optimizer.param_groups[0]["lr"]
        assert repr(optimizer) == "PipeOptimizer of SGD on 'worker1', 'worker2', 'worker3'"


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_a_scheduler_may_change_momentum_and_betas_too(make: Any, options: Any) -> None:
    model = layers(4)
    alone = Alone(model, make, **options)
    with Pipe(model, WORKERS[:2], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(make, **options)
        cycles = [
            torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=8)
            for each in (optimizer, alone.optimizer)
        ]
        for seed in range(3):
            train(pipe, optimizer, seed)
            alone.step(*batch(seed))
            for each in cycles:
                each.step()
        assert_same(pipe, alone.model)


def test_frozen_weights_keep_their_values_and_lose_the_state_of_the_optimizer() -> None:
    model = layers(6)
    alone = Alone(model, torch.optim.Adam, lr=0.01)
    with Pipe(model, WORKERS, Schedule1F1B(6), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        train(pipe, optimizer, 0)
        alone.step(*batch(0))
        model[:3].requires_grad_(False)
        alone.model[:3].requires_grad_(False)  # type: ignore[index]
        pipe.repartition(model, workers=WORKERS[:2])
        assert pipe.gradients()["0.weight"] is None
        train(pipe, optimizer, 1)
        alone.step(*batch(1))
        assert_same(pipe, alone.model)
        names = {name.partition(".")[0] for name in optimizer.state_dict()["state"]}
        assert names == {"3", "4", "5"}


def test_a_state_of_the_optimizer_is_loaded_by_name() -> None:
    model = layers(4)
    alone = Alone(model, torch.optim.Adam, lr=0.01)
    with Pipe(model, WORKERS[:3], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        train(pipe, optimizer, 0)
        saved, state = pipe.state_dict(), optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.01
    assert state["param_groups"][0]["params"] == list(dict(model.named_parameters()))
    with Pipe(layers(4, seed=5), WORKERS[2:], Schedule1F1B(4), mse) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.5)
        pipe.load_state_dict(saved)
        optimizer.load_state_dict(state)
        train(pipe, optimizer, 1)
        alone.step(*batch(0))
        alone.step(*batch(1))
        assert_same(pipe, alone.model)
        with pytest.raises(ConfigurationError, match="no state_dict of a PipeOptimizer"):
            optimizer.load_state_dict(alone.optimizer.state_dict())
        with pytest.raises(SerializationError, match="keep its state_dict"):
            copy.deepcopy(optimizer)
        with pytest.raises(ConfigurationError, match="takes no closure"):
            optimizer.step(lambda: 0)


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_a_snapshot_is_restored_on_other_stages_and_workers(
    make: Any, options: Any, tmp_path: Path
) -> None:
    model = layers(6)
    alone = Alone(model, make, **options)
    program: dict[str, Any] = {"losses": [0.5], "epoch": 3}
    with Pipe(model, WORKERS, Schedule1F1B(6), mse) as pipe:
        optimizer = pipe.optimizer(make, **options)
        train(pipe, optimizer, 0, 1)
        optimizer.param_groups[0]["lr"] = alone.optimizer.param_groups[0]["lr"] = 0.003
        assert pipe.save(tmp_path, step=2, state=program).step == 2
        train(pipe, optimizer, 2)
    for seed in range(3):
        if seed == 2:
            alone.optimizer.param_groups[0]["lr"] = 0.003
        else:
            alone.optimizer.param_groups[0]["lr"] = options["lr"]
        alone.step(*batch(seed))
    program = {"losses": [], "epoch": 0}
    schedule = ScheduleGPipe(6, replicas=(2, 1))
    with Pipe(cut_sequential(layers(6, seed=9), [2]), WORKERS[1:], schedule, mse) as pipe:
        optimizer = pipe.optimizer(make, lr=0.7)
        assert pipe.restore(tmp_path, state=program).step == 2
        assert program == {"losses": [0.5], "epoch": 3}
        train(pipe, optimizer, 2)
        assert_same(pipe, alone.model)
        assert optimizer.param_groups[0]["lr"] == 0.003
    with (
        Pipe(layers(5), WORKERS[:2], schedule=Schedule1F1B(2), loss=mse) as pipe,
        pytest.raises(StateMismatch, match=r"pipe/optimizer/0\.bias, .* and 31 more"),
    ):
        pipe.restore(tmp_path)
