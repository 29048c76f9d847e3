"""The training by maps: a network that learns to adapt to sinusoids, task by task.

Each step computes the gradient by maps and in this process alone; both must be equal.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import torchweft
from tests.faults import points
from tests.faults.map_plan import (
    BACKWARD,
    BESIDE,
    CHOSEN,
    CHUNKS,
    DEPENDENT,
    EACH,
    INNER,
    NESTED,
    RECORDED,
    STEPS,
    TWICE,
    Program,
)
from tests.faults.plan import TRAINER
from torchweft import mapreduce, rpc
from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass
from torchweft.errors import AutogradError, WorkerLost
from torchweft.mapreduce.execution import Execution
from torchweft.mapreduce.plan import Plan
from torchweft.mapreduce.shared import Shared

UNITS, SHOTS, INNER_STEPS, RATE = 16, 6, 2, 0.03
EXACT, THROUGH_OTHERS = 1e-12, 1e-10
STEP_LIMIT_S = 20.0

_program = Program()


def prepare(program: Program) -> None:
    """Sets the program that this process computes."""
    global _program
    _program = program


def left_behind() -> list[str]:
    """Returns the objects that maps and passes have left in this process."""
    kinds = (Context, LocalPass, Execution, Plan, Shared)
    return [f"a {type(each).__name__}" for each in gc.get_objects() if type(each) in kinds]


class Unequal(Exception):
    """A result differs from that of a single process."""


class Point(torch.autograd.Function):
    """The identity, whose gradient reaches a point."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, point: str) -> Tensor:
        ctx.point = point
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        points.reach(ctx.point)
        return gradient.clone(), None


def _with_point(value: Tensor, point: str) -> Tensor:
    made: Tensor = Point.apply(value, point)  # type: ignore[no-untyped-call]
    return made


# The computation


def network() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(1, UNITS), nn.Tanh(), nn.Linear(UNITS, UNITS), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(UNITS, 1)).double()


def _draw(seed: int) -> tuple[Tensor, Tensor]:
    """Returns a sinusoid as inputs and values: one set to adapt to, one to judge by."""
    generator = torch.Generator().manual_seed(seed)
    amplitude, phase = torch.rand(2, generator=generator, dtype=torch.float64)
    inputs = torch.rand(2, SHOTS, 1, generator=generator, dtype=torch.float64) * 10 - 5
    return inputs, (0.1 + 4.9 * amplitude) * torch.sin(inputs - torch.pi * phase)


def _error(model: nn.Module, weights: dict[str, Tensor], inputs: Tensor, goals: Tensor) -> Tensor:
    error: Tensor = (functional_call(model, weights, (inputs,)) - goals).square().mean()
    return error


def _adapted_error(model: nn.Module, weights: dict[str, Tensor], seed: int) -> Tensor:
    inputs, goals = _draw(seed)
    create_graph = _program.is_second_order or _program.shape == INNER
    for _ in range(INNER_STEPS):
        inner = _error(model, weights, inputs[0], goals[0])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=create_graph)
        weights = _descended(weights, gradients)
    return _error(model, weights, inputs[1], goals[1])


def _descended(weights: dict[str, Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    pairs = zip(weights.items(), gradients, strict=True)
    return {name: value - RATE * gradient for (name, value), gradient in pairs}


def first_errors(model: nn.Module, seeds: Tensor) -> Tensor:
    """Returns the error at each task, without adapting."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    errors = []
    for seed in seeds.reshape(-1).tolist():
        inputs, goals = _draw(seed)
        errors.append(_error(model, weights, inputs[0], goals[0]))
    return torch.stack(errors)


def adapted_errors(model: nn.Module, seeds: Tensor, of_before: Tensor, scale: Any) -> Tensor:
    """Returns the error at each task, after adapting."""
    weights = _weights(model)
    found = torch.stack(
        [_adapted_error(model, weights, seed) for seed in seeds.reshape(-1).tolist()]
    )
    return found * _value(scale) + torch.tanh(of_before).reshape(-1)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of a model; the gradient of the first one reaches a point."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    first = next(iter(weights))
    return {**weights, first: _with_point(weights[first], "gradient made")}


def _value(scale: Any) -> Tensor:
    value: Tensor = scale.to_here() if isinstance(scale, rpc.RRef) else scale
    return value


# Parts


def first_part(model: nn.Module, seeds: Tensor) -> Tensor:
    points.reach("part")
    return _with_point(first_errors(model, seeds), "gradient comes")


def part(model: nn.Module, seeds: Tensor, of_before: Tensor, scale: Any) -> Tensor:
    """The adapted errors, with points on the way."""
    points.reach("part")
    errors: Tensor = _COMPUTE[_program.shape](model, seeds, of_before, scale)
    points.reach("part done")
    return _with_point(errors, "gradient comes")


def _nested(model: nn.Module, seeds: Tensor, of_before: Tensor, scale: Any) -> Tensor:
    """A part that computes half of its result by a map of its own."""
    own = adapted_errors(model, seeds, of_before, scale)
    others = mapreduce.remote_sync_call(
        inner_part,
        args=(model, seeds.reshape(-1)),
        partitioner=mapreduce.dim_partitioner(0, workers=_inner_workers()),
        reducer=torch.cat,
    )
    return own.add(others)


def _inner(model: nn.Module, seeds: Tensor, of_before: Tensor, scale: Any) -> Tensor:
    """A part whose inner loop is computed by maps."""
    found = [_adapted_by_others(model, seed) for seed in seeds.reshape(-1).tolist()]
    return torch.stack(found) * _value(scale) + torch.tanh(of_before).reshape(-1)


def _adapted_by_others(model: nn.Module, seed: int) -> Tensor:
    inputs, goals = _draw(seed)
    weights = _weights(model)
    context_id = torchweft.autograd.current_context_id()
    for _ in range(INNER_STEPS):
        whole = {name: mapreduce.broadcast(value) for name, value in weights.items()}
        inner = mapreduce.remote_sync_call(
            inner_error,
            args=(model, whole, inputs[0], goals[0]),
            partitioner=mapreduce.dim_partitioner(0, workers=_inner_workers()),
            reducer=mapreduce.mean_reducer,
        )
        gradients = mapreduce.autograd.grad(
            context_id, inner, list(weights.values()), create_graph=True
        )
        weights = _descended(weights, gradients)
    return _error(model, weights, inputs[1], goals[1])


def inner_part(model: nn.Module, seeds: Tensor) -> Tensor:
    points.reach("inner part")
    return _with_point(first_errors(model, seeds), "gradient comes")


def inner_error(
    model: nn.Module, weights: dict[str, Tensor], inputs: Tensor, goals: Tensor
) -> Tensor:
    points.reach("inner part")
    return _with_point(_error(model, weights, inputs, goals), "gradient comes")


_COMPUTE = {
    **dict.fromkeys(("plain", BESIDE, DEPENDENT), adapted_errors),
    NESTED: _nested,
    INNER: _inner,
}


def _inner_workers() -> list[str]:
    """Returns the workers of nested maps: all but the trainer, which never runs out of threads."""
    return [info.name for info in rpc.get_worker_infos() if info.name != TRAINER]


# Partitioners


def chosen(
    model: Any, seeds: Tensor, *others: Any
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A partitioner that gives the workers tasks in turn."""
    names = _workers()
    rows = torch.split(seeds, 2)
    columns: list[Sequence[Any]] = [
        torch.split(other, 2) if isinstance(other, Tensor) and other.dim() else [other] * len(rows)
        for other in others
    ]
    return [
        (names[place % len(names)], (model, row, *rest), {})
        for place, (row, *rest) in enumerate(zip(rows, *columns, strict=True))
    ]


def _workers() -> list[str]:
    infos = [info.name for info in rpc.get_worker_infos()]
    return infos if _program.takes_part else [name for name in infos if name != TRAINER]


def _partitioner() -> Any:
    if _program.cut == CHOSEN:
        return chosen
    return mapreduce.dim_partitioner(
        0, exclusive=_program.cut != CHUNKS, keepdim=_program.cut != EACH, workers=_workers()
    )


# The training


class Training:
    """The trainer's side."""

    def __init__(self) -> None:
        self.model = network()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.leaves = [*self.model.parameters(), self.scale]
        self.within = THROUGH_OTHERS if _program.shape == INNER else EXACT

    def run(self, note_step: Callable[[int], None]) -> str:
        """Trains; returns ``equal``, or raises ``Unequal``.

        Args:
            note_step: Called with the number of each step before it.
        """
        for number in range(1, STEPS + 1):
            expected = self._alone(_seeds(number))
            note_step(number)
            begin_s = time.monotonic()
            found = self._by_maps(_seeds(number))
            took_s = time.monotonic() - begin_s
            if took_s > STEP_LIMIT_S:
                raise Unequal(f"step {number} took {took_s:.1f} s")
            self._compare(number, found, expected)
            with torch.no_grad():
                for leaf, gradient in zip(self.leaves, expected[1:], strict=False):
                    leaf.sub_(gradient, alpha=0.01)
        return "equal"

    def _compare(self, number: int, found: list[Tensor], expected: list[Tensor]) -> None:
        if _program.way != RECORDED:
            assert len(found) == len(expected)
        largest = max(float(each.abs().max()) for each in expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=False)):
            difference = float((one - other).abs().max()) / largest
            if not difference <= self.within:
                what = "the loss" if place == 0 else f"gradient {place}"
                raise Unequal(f"in step {number}, {what} differs by {difference:.1e}")

    # By maps

    def _by_maps(self, seeds: Tensor) -> list[Tensor]:
        with torchweft.autograd.context() as context_id:
            loss = self._loss(seeds)
            return [loss.detach(), *self._gradients(context_id, loss)]

    def _loss(self, seeds: Tensor) -> Tensor:
        before = torch.zeros(len(seeds), dtype=torch.float64)
        scale: Any = mapreduce.broadcast(self.scale)
        if _program.has_reference:
            scale = rpc.RRef(self.scale)
        if _program.shape == DEPENDENT:
            before = _map(first_part, self.model, seeds).wait()
        other = None
        if _program.shape == BESIDE:
            other = _map(first_part, self.model, seeds)
        loss: Tensor = _map(part, self.model, seeds, before, scale).wait().mean()
        return loss if other is None else loss + other.wait().mean()

    def _gradients(self, context_id: int, loss: Tensor) -> list[Tensor]:
        grad = mapreduce.autograd.grad
        if _program.way == BACKWARD:
            for leaf in self.leaves:
                leaf.grad = None
            mapreduce.autograd.backward(context_id, loss)
            return [_grad_of(leaf) for leaf in self.leaves]
        if _program.way == TWICE:
            first = grad(context_id, loss, self.leaves, retain_graph=True)
            return [*first, *grad(context_id, loss, self.leaves)]
        if _program.way == RECORDED:
            first = grad(context_id, loss, self.leaves, create_graph=True)
            try:
                return [*first, *grad(context_id, _squares(first), self.leaves)]
            except AutogradError as error:
                if not isinstance(error.__cause__, WorkerLost):
                    raise
                # Besides the results of maps, gradients have come to the trainer.
                return list(first)
        return list(grad(context_id, loss, self.leaves))

    # Alone

    def _alone(self, seeds: Tensor) -> list[Tensor]:
        before = torch.zeros(len(seeds), dtype=torch.float64)
        if _program.shape == DEPENDENT:
            before = first_errors(self.model, seeds)
        errors = _alone_errors(self.model, seeds, before, self.scale)
        loss = errors.mean()
        if _program.shape == BESIDE:
            loss = loss + first_errors(self.model, seeds).mean()
        is_recorded = _program.way == RECORDED
        first = torch.autograd.grad(loss, self.leaves, create_graph=is_recorded)
        found = [loss.detach(), *(each.detach() for each in first)]
        if _program.way == TWICE:
            found += found[1:]
        if is_recorded:
            found += torch.autograd.grad(_squares(first), self.leaves)
        return found


def _alone_errors(model: nn.Module, seeds: Tensor, before: Tensor, scale: Tensor) -> Tensor:
    errors = adapted_errors(model, seeds, before, scale)
    return errors + first_errors(model, seeds) if _program.shape == NESTED else errors


def _map(function: Any, *args: Any) -> Any:
    return mapreduce.remote_async_call(
        function,
        args=args,
        partitioner=_partitioner(),
        reducer=torch.cat,
        balance=_program.balance,
        rerun=_program.may_rerun,
        concurrency=_program.concurrency,
    )


def _seeds(number: int) -> Tensor:
    return torch.arange(_program.tasks) + 100 * number


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.square().sum() for each in tensors]).sum()


def _grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
