"""Random sequences of what a program does with an optimizer, beside one process.

Each kind of training has the same operations: backward passes that add up, steps, dropped
gradients, clipping, schedulers, changed hyper-parameters, saved and loaded states, snapshots, and
moves. A sequence does each operation on both sides, and compares norms, weights, groups and states.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.contract.processes.hybrid_functions import OF_ROWS, RULES, draw, loss_of, make_net
from tests.contract.processes.pipeline_models import WIDTH, layers
from torchweft import autograd, checkpoint
from torchweft.embedding import Copies, TableWise
from torchweft.hybrid import HybridModel
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer, clip_grad_norm_
from torchweft.pipeline import (
    Pipe,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleNaive,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
)

mse = nn.functional.mse_loss
WORKERS = ["worker0", "worker1", "worker2", "driver"]


class Halved(torch.optim.Optimizer):
    """SGD whose momentum is kept in a type of its own, with a note beside it."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                held = state.setdefault("held", torch.zeros_like(weight, dtype=torch.float32))
                state["note"] = "halved"
                held.mul_(0.5).add_(weight.grad + group["weight_decay"] * weight)
                weight.sub_(group["lr"] * held.double())


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.01, "maximize": True, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "centered": True, "eps": 1e-3}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.02}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (Halved, {"lr": 0.02}),
]

SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 2, 0.7),
    lambda o: lr_scheduler.LambdaLR(o, [(lambda n, g=g: 0.9 ** (n * g)) for g in _numbers(o)]),
    lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.95),
    lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=200, cycle_momentum=_cycles(o)),
    lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 3, cycle_momentum=_cycles(o)),
    lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.8),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
]


def _numbers(optimizer: Any) -> range:
    return range(1, 1 + len(optimizer.param_groups))


def _cycles(optimizer: Any) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def grouped(weights: Any, *, make: Any, n_groups: int, **options: Any) -> torch.optim.Optimizer:
    """Makes an optimizer of one, two or three groups, by the shapes of the weights."""
    weights = list(weights)
    kinds = [
        [each for each in weights if _kind(each, n_groups) == kind] for kind in range(n_groups)
    ]
    groups = [
        {"params": kind, "lr": options["lr"] / (1 + number), "weight_decay": 0.02 * number}
        for number, kind in enumerate(kinds)
        if kind
    ]
    optimizer: torch.optim.Optimizer = make(groups, **options)
    return optimizer


def _kind(weight: Tensor, n_groups: int) -> int:
    kind = 0 if weight.dim() > 1 else 1 + (weight.shape[0] > WIDTH)
    return kind % n_groups


class Training(Protocol):
    """A distributed training, beside the same training in this process."""

    optimizers: list[Any]
    """The distributed optimizer, and that of this process."""
    operations: Sequence[str]

    def backward(self, seed: int) -> None: ...
    def step(self) -> None: ...
    def check(self) -> None: ...


class Common:
    """The operations that all kinds of training have."""

    optimizers: list[Any]
    schedulers: list[Any]
    states: list[Any]

    def begin(self, pick: random.Random) -> None:
        self.states = []
        self.schedulers = []
        if pick.random() < 0.6:
            make = pick.choice(SCHEDULERS)
            self.schedulers = [make(each) for each in self.optimizers]

    def zero_grad(self, set_to_none: bool) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def schedule(self, loss: float) -> None:
        for each in self.schedulers:
            each.step(*([loss] if isinstance(each, lr_scheduler.ReduceLROnPlateau) else []))

    def change(self, number: int, name: str, factor: float) -> None:
        for each in self.optimizers:
            group = each.param_groups[number % len(each.param_groups)]
            if name in group:
                group[name] *= factor

    def save_state(self) -> None:
        self.states = [copy.deepcopy(each.state_dict()) for each in self.optimizers]

    def load_state(self) -> None:
        for each, state in zip(self.optimizers, self.states, strict=False):
            load_exactly(each, state)


def load_exactly(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a state; into an optimizer of torch, without the conversion of types."""
    optimizer.load_state_dict(copy.deepcopy(state))
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        for number, values in copy.deepcopy(state)["state"].items():
            optimizer.state[weights[number]] = values


PLACES: list[tuple[Any, int]] = [
    (ScheduleNaive(4), 2),
    (ScheduleGPipe(4), 3),
    (Schedule1F1B(4), 3),
    (Schedule1F1B(2), 4),
    (ScheduleInterleaved1F1B(4), 2),
    (ScheduleLoopedBFS(4, stages_per_worker=2), 2),
    (ScheduleInterleavedZeroBubble(4), 2),
    (ScheduleZBH1(4), 3),
    (ScheduleZBVZeroBubble(4), 2),
    (ScheduleDualPipeV(4), 2),
    (ScheduleGPipe(4, replicas=(2, 1)), 3),
    (Schedule1F1B(4, replicas=(1, 2, 1)), 4),
]


class Added(nn.Module):
    """A map by the sum of two weights, beside the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.delta = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ (self.base + self.delta))


def chain(seed: int) -> nn.Sequential:
    """Returns a chain with weights that are added before use, and one with two tied weights."""
    blocks = list(layers(5, seed))
    if seed % 2:
        first, last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        last.weight = first.weight
        return nn.Sequential(blocks[0], first, *blocks[1:4], Added(), last)
    return nn.Sequential(blocks[0], Added(), *blocks[1:])


class InStages(Common):
    """A pipeline."""

    operations = ("backward", "backward", "step", "step", "zero", "clip", "schedule", "change",
                  "save", "load", "snapshot", "move")  # fmt: skip

    def __init__(self, pick: random.Random, stack: contextlib.ExitStack) -> None:
        self.pick = pick
        self.seed = pick.randrange(100)
        self.model = chain(self.seed)
        self.folder = stack.enter_context(tempfile.TemporaryDirectory())
        schedule, names = self._place()
        self.pipe = stack.enter_context(Pipe(chain(self.seed), names, schedule, mse))
        kind, options = pick.choice(CLASSES)
        maker = functools.partial(grouped, make=kind, n_groups=pick.randint(1, 3))
        self.optimizers = [
            self.pipe.optimizer(maker, **options),
            maker(self.model.parameters(), **options),
        ]
        self.said = f"{kind.__name__} {options} {schedule} on {names}"
        self.n_steps = 0
        self.begin(pick)

    def _place(self) -> tuple[Any, list[str]]:
        schedule, count = self.pick.choice(PLACES)
        return schedule, self.pick.sample(WORKERS, count)

    def backward(self, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        target = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
        loss = self.pipe.step(inputs, target)
        expected = mse(self.model(inputs), target)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        return expected.item()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def clip(self, max_norm: float, norm_type: float) -> None:
        norm = self.pipe.clip_grad_norm_(max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)

    def snapshot(self) -> None:
        """Saves, trains on, and restores."""
        self.n_steps += 1
        self.pipe.save(self.folder, step=self.n_steps)
        kept = copy.deepcopy((self.model.state_dict(), self.optimizers[1].state_dict()))
        self.backward(self.pick.randrange(1000))
        self.step()
        self.change(0, "lr", 0.3)
        if self.pick.random() < 0.5:
            self.move()
        self.pipe.restore(self.folder)
        self.model.load_state_dict(kept[0])
        load_exactly(self.optimizers[1], kept[1])

    def move(self) -> None:
        """Moves the stages, which drops the gradients."""
        schedule, names = self._place()
        self.pipe.repartition(chain(self.seed), workers=names, schedule=schedule)
        self.model.zero_grad()

    def check(self) -> None:
        found, expected = self.pipe.state_dict(), self.model.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-8), name
        gradients = self.pipe.gradients()
        for name, weight in self.model.named_parameters():
            here, there = weight.grad, gradients[name]
            assert (here is None) == (there is None), name
            assert here is None or torch.allclose(there, here, rtol=1e-6, atol=1e-8), name
        check_groups(*self.optimizers)
        saved = self.optimizers[0].state_dict()["state"]
        own = self.optimizers[1].state
        for name, weight in self.model.named_parameters():
            check_state(saved.get(name, {}), own.get(weight, {}))


def check_groups(found: Any, expected: Any) -> None:
    assert len(found.param_groups) == len(expected.param_groups)
    for mine, theirs in zip(found.param_groups, expected.param_groups, strict=True):
        assert mine.keys() == theirs.keys()
        assert len(set(map(str, mine["params"]))) >= len(theirs["params"])  # Ties have two names.
        for key in mine.keys() - {"params"}:
            assert mine[key] == theirs[key], key


def check_state(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-7), key
        else:
            assert found[key] == pytest.approx(value) if isinstance(value, float) else value, key


class Two(nn.Module):
    """A part of a model on some worker."""

    def __init__(self, seed: int, width_in: int, width_out: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(width_in, width_out).double()
        self.delta = nn.Parameter(torch.randn(width_out, width_in, dtype=torch.float64))
        self.extra = nn.Linear(width_out, width_out).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.layer.weight + self.delta, self.layer.bias)
        result: Tensor = self.extra(torch.tanh(hidden))
        return result


class OnOwners(Common):
    """A ``DistributedOptimizer``: its backward passes and its step are in one context."""

    operations = ("train", "train", "train", "zero", "schedule", "change", "save", "load",
                  "snapshot", "group")  # fmt: skip

    def __init__(self, pick: random.Random, stack: contextlib.ExitStack) -> None:
        self.pick = pick
        self.folder = stack.enter_context(tempfile.TemporaryDirectory())
        recipes = [(pick.randrange(9), 4, 5), (pick.randrange(9), 5, 3)]
        owners = pick.sample(["worker0", "worker1", "worker2"], 2)
        self.remote = [RemoteModule(*each, args=r) for each, r in zip(
            [(owner, Two) for owner in owners], recipes, strict=True)]  # fmt: skip
        self.model = nn.Sequential(*[Two(*each) for each in recipes])
        kind, options = pick.choice(CLASSES)
        references = [each for module in self.remote for each in module.remote_parameters()]
        weights = list(self.model.parameters())
        cut = pick.randrange(1, len(weights) - 2)
        self.late = (references[-2:], weights[-2:])

        def groups(parameters: list[Any]) -> list[dict[str, Any]]:
            return [
                {"params": parameters[:cut], "lr": options["lr"] / 2},
                {"params": parameters[cut:-2], "weight_decay": 0.01},
            ]

        self.references, self.weights = references[:-2], weights[:-2]
        self.optimizers = [
            DistributedOptimizer(kind, groups(references), **options),
            kind(groups(weights), **options),
        ]
        self.said = f"{kind.__name__} {options} on {owners}"
        self.n_steps = 0
        self.begin(pick)

    def train(self) -> float:
        found, own = self.optimizers
        own.zero_grad()
        with autograd.context() as context_id:
            for _ in range(self.pick.randint(1, 3)):
                x = torch.randn(6, 4, dtype=torch.float64)
                loss = self.remote[1](self.remote[0](x)).square().mean()
                autograd.backward(context_id, [loss])
                expected = self.model(x).square().mean()
                expected.backward()
                assert torch.allclose(loss, expected, rtol=1e-8)
            if self.pick.random() < 0.5:
                norm_type = self.pick.choice([1.0, 2.0, math.inf])
                norm = clip_grad_norm_(context_id, self.references, 0.1, norm_type)
                theirs = nn.utils.clip_grad_norm_(self.weights, 0.1, norm_type)
                assert torch.allclose(norm, theirs)
            found.step(context_id)
        own.step()
        return expected.item()

    def zero_grad(self, set_to_none: bool) -> None:
        """Changes nothing: each context begins without gradients, as ``train`` here does."""
        self.optimizers[0].zero_grad(set_to_none)

    def add_group(self) -> None:
        if self.late[0] and not self.schedulers:
            for optimizer, parameters in zip(self.optimizers, self.late, strict=True):
                optimizer.add_param_group({"params": parameters, "lr": 0.005})
            self.references, self.weights = (
                self.references + self.late[0],
                [*self.model.parameters()],
            )
            self.late, self.states = ([], []), []

    def snapshot(self) -> None:
        """Saves, trains on, and restores."""
        self.n_steps += 1
        tree = {"parts": self.remote, "optimizer": self.optimizers[0]}
        checkpoint.save(self.folder, tree, step=self.n_steps, random_states=False)
        kept = copy.deepcopy((self.model.state_dict(), self.optimizers[1].state_dict()))
        self.train()
        self.change(1, "lr", 0.5)
        checkpoint.restore(self.folder, tree, random_states=False)
        self.model.load_state_dict(kept[0])
        load_exactly(self.optimizers[1], kept[1])

    def check(self) -> None:
        found = [each.to_here() for module in self.remote for each in module.remote_parameters()]
        for mine, theirs in zip(found, self.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)
        check_groups(*self.optimizers)
        mine, theirs = (each.state_dict()["state"] for each in self.optimizers)
        assert mine.keys() == theirs.keys()
        for number, state in theirs.items():
            check_state(mine[number], state)


class OnServers(Common):
    """A hybrid model: rows on servers, a table that stays, and a dense part."""

    operations = ("backward", "backward", "backward", "step", "step", "zero", "clip", "schedule",
                  "change", "save", "load", "snapshot")  # fmt: skip

    def __init__(self, pick: random.Random, stack: contextlib.ExitStack) -> None:
        self.pick = pick
        self.folder = stack.enter_context(tempfile.TemporaryDirectory())
        rule = pick.choice(["sgd", "adagrad", "row-wise", "adam"])
        kind, options = pick.choice(CLASSES)
        self.model = make_net(0)
        self.hybrid = stack.enter_context(contextlib.closing(HybridModel(
            make_net(0), ["worker0", "worker1"], name=f"tables{pick.random()}",
            batches=[draw(0, step)[0] for step in range(3)],
            places={
                "words": TableWise("worker0"), "tower.users": TableWise("worker1"), "days": Copies()
            },
        )))  # fmt: skip
        tables = [
            [self.model.words.weight, self.model.tower.users.weight],
            [self.model.days.weight],
        ]
        maker = functools.partial(grouped, make=kind, n_groups=pick.randint(1, 2))
        is_table = {id(each) for some in tables for each in some}
        dense = [each for each in self.model.parameters() if id(each) not in is_table]
        self.parts = [*map(OF_ROWS[rule], tables), maker(dense, **options)]
        self.dense = self.parts[-1]
        self.optimizers = [
            self.hybrid.optimizer(RULES[rule], lambda given: maker(given, **options)),
            Joined(self.parts),
        ]
        self.said = f"{rule} and {kind.__name__} {options}"
        self.n_steps = 0
        self.begin(pick)

    def begin(self, pick: random.Random) -> None:
        self.states, self.schedulers = [], []
        if pick.random() < 0.6:
            decay = pick.choice([0.5, 0.9])
            self.schedulers = [
                lr_scheduler.ExponentialLR(each, decay)
                for each in (self.optimizers[0], *self.parts)
            ]

    def backward(self, seed: int) -> float:
        batch = draw(0, seed)
        loss = loss_of(self.hybrid, batch)
        loss.backward()
        expected = loss_of(self.model, batch)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        return expected.item()

    def step(self) -> None:
        """Steps, and drops the gradients, as those of rows are dropped."""
        for each in self.optimizers:
            each.step()
        self.zero_grad(True)

    def clip(self, max_norm: float, norm_type: float) -> None:
        norm = self.optimizers[0].clip_grad_norm_(max_norm, norm_type)
        grads = [each.grad for each in self.model.parameters() if each.grad is not None]
        dense = [each.coalesce().values() if each.is_sparse else each for each in grads]
        expected = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(each, norm_type) for each in dense])
            if dense
            else torch.zeros(1, dtype=torch.float64),
            norm_type,
        )
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        factor = min(1.0, max_norm / (expected.item() + 1e-6))
        for each in grads:
            each.mul_(factor)

    def change(self, number: int, name: str, factor: float) -> None:
        if name == "lr":
            super().change(number, name, factor)

    def snapshot(self) -> None:
        self.n_steps += 1
        self.hybrid.save(self.folder, step=self.n_steps)
        kept = copy.deepcopy((self.model.state_dict(), [each.state_dict() for each in self.parts]))
        self.zero_grad(True)
        self.backward(self.pick.randrange(1000))
        self.step()
        self.change(1, "lr", 0.5)
        self.hybrid.restore(self.folder)
        self.model.load_state_dict(kept[0])
        for each, state in zip(self.parts, kept[1], strict=True):
            load_exactly(each, state)

    def check(self) -> None:
        found = self.hybrid.full_state_dict()
        for name, value in self.model.state_dict().items():
            assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-8), name
        for mine, theirs in zip(
            self.optimizers[0].param_groups, self.optimizers[1].param_groups, strict=True
        ):
            assert mine["lr"] == theirs["lr"]
        dense = self.optimizers[0].dense
        mine = [each for group in dense.param_groups for each in group["params"]]
        theirs = [each for group in self.dense.param_groups for each in group["params"]]
        for one, other in zip(mine, theirs, strict=True):
            check_state(dense.state.get(one, {}), self.dense.state.get(other, {}))


class Joined:
    """The optimizers of rows, of copies and of the dense part in this process, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.parts for group in each.param_groups]

    def step(self) -> None:
        for each in self.parts:
            each.step()

    def zero_grad(self, set_to_none: bool) -> None:
        for each in self.parts[:-1]:
            each.zero_grad(True)  # Rows without a gradient are never stepped.
        self.parts[-1].zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        rows, *others = self.parts
        return {"lr": rows.param_groups[0]["lr"], "others": [each.state_dict() for each in others]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of the trainer's parts; that of rows on servers stays beside them."""
        self.parts[0].param_groups[0]["lr"] = state["lr"]
        for each, saved in zip(self.parts[1:], state["others"], strict=True):
            load_exactly(each, saved)


KINDS = {"pipeline": InStages, "owners": OnOwners, "servers": OnServers}


def run(kind: str, seed: int, length: int = 10) -> None:
    """Runs one sequence on both sides; raises where they differ, with the sequence."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    done: list[str] = []
    said = ""
    try:
        with contextlib.ExitStack() as stack:
            training: Any = KINDS[kind](pick, stack)
            said = training.said
            for operation in _operations(pick, training.operations, length):
                done.append(operation)
                _do(pick, training, operation)
                if pick.random() < 0.2:
                    training.check()
            training.check()
    except BaseException as error:
        if hasattr(error, "add_note"):
            error.add_note(f"{kind}, seed {seed}: {said}: {' '.join(done)}")
        raise


def _operations(pick: random.Random, among: Sequence[str], length: int) -> Iterator[str]:
    yield among[0]
    for _ in range(length):
        yield pick.choice(among)


def _do(pick: random.Random, training: Any, operation: str) -> None:
    if operation == "backward":
        training.loss = training.backward(pick.randrange(1000))
    elif operation == "train":
        training.loss = training.train()
    elif operation == "step":
        training.step()
    elif operation == "zero":
        training.zero_grad(pick.random() < 0.5)
    elif operation == "clip":
        training.clip(pick.choice([0.05, 1.0, 100.0]), pick.choice([1.0, 2.0, 3.0, math.inf]))
    elif operation == "schedule":
        training.schedule(training.loss)
    elif operation == "change":
        name = pick.choice(["lr", "lr", "weight_decay"])
        training.change(pick.randrange(3), name, pick.choice([0.5, 0.9, 1.2]))
    elif operation == "save":
        training.save_state()
    elif operation == "load":
        training.load_state()
    elif operation == "group":
        training.add_group()
    elif operation == "snapshot":
        training.snapshot()
    else:
        training.move()
