"""Pipelines whose stages move to other workers, and their snapshots."""

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
from torchweft.errors import ConfigurationError, SerializationError, StateMismatch
from torchweft.launch import Nursery
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
    cut_sequential,
    weights,
)

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
TINY = 1e-12
mse = nn.functional.mse_loss


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


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)


def train(pipe: Pipe, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        pipe.step(*batch(seed))
        optimizer.step()


def assert_same(pipe: Pipe, model: nn.Module) -> None:
    """Compares the weights on each worker with those of a model in this process."""
    expected = model.state_dict()
    for found in pipe._deployment.call_named(weights.values):
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
