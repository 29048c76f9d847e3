"""Random programs over three workers that use autograd in all the ways that programs do.

They change tensors in place, make views and detached tensors, and send several of these in one
message. They hook computed and received tensors, have custom functions with and without gradients,
and recompute. The seed determines a program: no random choice depends on a value, so a program
runs the same in every world. torch must refuse the same operations in each world, so refusals are
noted too.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

from tests.gradient_functions import Noted, Rejoin, Sine, TwoOrOne
from tests.unit.autograd.cluster import World

SIZE = 4
Chance = random.Random


class InPlace(torch.autograd.Function):
    """Changes its argument in place, and saves the result for the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value.tanh_()
        ctx.mark_dirty(value)
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


class Scaled(torch.autograd.Function):
    """Has two non-differentiable results: one between others, and one of another dtype."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        norm, mask = value.abs().sum(), value > 0
        ctx.mark_non_differentiable(norm, mask)
        ctx.save_for_backward(value)
        ctx.factor = factor
        return value * factor, norm, value.sin(), mask

    @staticmethod
    def backward(
        ctx: Any, first: Tensor, norm: Tensor, third: Tensor, mask: Tensor
    ) -> tuple[Tensor, None]:
        assert norm.shape == ()
        assert mask.shape == first.shape
        (value,) = ctx.saved_tensors
        return first * ctx.factor + third * value.cos(), None


def fitted(value: Tensor) -> Tensor:
    """Returns a vector of ``SIZE`` elements made of a tensor of any shape, keeping the graph."""
    flat = value.reshape(-1)
    return flat if flat.numel() == SIZE else flat.repeat(SIZE)[:SIZE]


class Run:
    """One run of a program.

    Args:
        world: The workers that it runs on.
        seed: Determines its steps.

    Attributes:
        noted: The messages of refused operations.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.noted: list[object] = []
        self._world = world
        self._chance = Chance(seed)
        self._values = [[world.parameter(worker, "x", SIZE) * 2] for worker in range(3)]
        self._keeping: list[Tensor] = []
        self._received: set[Node] = set()

    def roots(self, steps: int) -> list[Tensor]:
        """Runs forward, and returns the roots of the backward pass."""
        for _ in range(steps):
            worker = self._chance.randrange(3)
            step = self._chance.choices(list(_STEPS), list(_STEPS.values()))[0]
            with self._noting():
                step(self, worker)
        roots: list[Tensor] = []
        for value in [self._late(0) for _ in range(3)]:
            if value.requires_grad:
                with self._noting():
                    roots.append(value.sum())
        return roots

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.noted.append(str(error)[:60])

    def kept(self) -> list[Tensor | None]:
        """Returns the gradients that ``retain_grad`` kept; None where there is none."""
        return [value.grad for value in self._keeping]

    def _late(self, worker: int) -> Tensor:
        # Prefer recent values, for deep graphs.
        pool = self._values[worker]
        return pool[-1 - int(len(pool) * self._chance.random() ** 2)]

    def _add(self, worker: int, *made: Tensor) -> None:
        self._values[worker] += [each for each in made if each.is_floating_point()]

    # Steps

    def compute(self, worker: int) -> None:
        first, second = fitted(self._late(worker)), fitted(self._late(worker))
        weight = self._world.parameter(worker, self._chance.choice("vw"), SIZE)
        kind = self._chance.randrange(5)
        if kind == 0:
            self._add(worker, Sine.apply(first, 0.5, second))
        elif kind == 1:
            self._add(worker, torch.tanh(first * second.sum()))
        elif kind == 2:
            self._add(worker, *torch.stack([first, second]).tanh().unbind())
        else:
            self._add(worker, torch.tanh(first * weight + second))

    def send(self, worker: int) -> None:
        sent: list[Tensor] = []
        for _ in range(self._chance.choice([1, 1, 2, 3])):
            value = self._late(worker)
            sent.append(value)
            kind = self._chance.randrange(6)
            if kind == 0:
                sent.append(self._view(value))
            elif kind == 1:
                sent.append(value.detach())
            elif kind == 2:
                sent += [value.view(-1)[:1], self._world.parameter(worker, "w", SIZE)]
        self._chance.shuffle(sent)
        other = self._chance.randrange(3)
        self._add(other, *self._send(worker, other, *sent))

    def _send(self, worker: int, other: int, *sent: Tensor) -> list[Tensor]:
        # A tensor at two places of a message is a single tensor at the receiver too.
        received = self._world.send(worker, other, *{id(each): each for each in sent}.values())
        self._received |= {each.grad_fn for each in received if each.grad_fn is not None}
        return received

    def call(self, worker: int) -> None:
        """Sends a value through another worker and back, which makes cycles."""
        other = (worker + self._chance.choice([1, 2])) % 3
        arguments = self._send(worker, other, self._late(worker), self._late(worker))
        weight = self._world.parameter(other, "w", SIZE)
        made = torch.tanh(fitted(arguments[0]) * weight - fitted(arguments[-1]))
        results = [made, *arguments, made.view(2, 2)[1]]
        results = [results[0], *self._chance.sample(results[1:], self._chance.randrange(3))]
        self._add(other, made)
        self._add(worker, *self._send(other, worker, *results))

    def _view(self, value: Tensor) -> Tensor:
        kind = self._chance.randrange(6)
        if kind == 0:
            return value.view(-1)
        if kind == 1:
            return value[:2] if value.dim() else value.view(1)
        if kind == 2:
            return value[-1:] if value.dim() else value.view(1)
        if kind == 3:
            return value.unsqueeze(0)
        if value.dim() > 2:
            return value.reshape(-1)
        return value.expand(2, *value.shape) * 0.5 if kind == 4 else value.t()

    def view(self, worker: int) -> None:
        self._add(worker, self._view(self._late(worker)))

    def detach(self, worker: int) -> None:
        alias = self._late(worker).detach()
        self._add(worker, alias.requires_grad_() if self._chance.random() < 0.2 else alias)

    def change(self, worker: int) -> None:
        value, other = self._late(worker), self._late(worker)
        kind = self._chance.randrange(6)
        if kind == 0:
            value.mul_(0.7)
        elif kind == 1:
            value.add_(other.reshape(-1)[0] * 0.3)
        elif kind == 2:
            value.tanh_()
        elif kind == 3:
            value.view(-1)[0] = other.sum() * 0.5
        elif kind == 4:
            with torch.no_grad():
                value.mul_(0.9)
        else:
            self._add(worker, InPlace.apply(value))

    def hook(self, worker: int) -> None:
        value = self._late(worker)
        # A view whose base has changed gets its node when grad_fn is read. PyTorch before 2.15
        # crashes if that happens within register_hook.
        _ = value.grad_fn
        bound = self._chance.choice([0.3, 0.6])

        def clamp(gradient: Tensor | None) -> Tensor | None:
            # Not linear: it must see the whole gradient, once.
            return None if gradient is None else gradient.clamp(-bound, bound) * 1.5

        value.register_hook(clamp)

    def hook_node(self, worker: int) -> None:
        node, is_before = self._late(worker).grad_fn, self._chance.random() < 0.5
        if node is None or node in self._received:  # A placeholder is never run.
            return
        if is_before:
            node.register_prehook(_scaled)
        else:
            node.register_hook(lambda results, _: _scaled(results))

    def keep(self, worker: int) -> None:
        value = self._late(worker)
        if not value.is_leaf:
            value.retain_grad()
            self._keeping.append(value)

    def apply(self, worker: int) -> None:
        first, second = fitted(self._late(worker)), fitted(self._late(worker))
        kind = self._chance.randrange(5)
        if kind == 0:
            self._add(worker, *[each / 10 for each in TwoOrOne.apply(first)])
        elif kind == 1:
            self._add(worker, *Scaled.apply(first, 0.5))
        elif kind == 2:
            self._add(worker, Noted.apply(first))
        else:
            self._add(worker, Rejoin.apply(first, second))

    def recompute(self, worker: int) -> None:
        weight = self._world.parameter(worker, "v", SIZE)

        def segment(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
            made = torch.tanh(first * weight + second.sin())
            return made, (made * second).exp() * 0.1

        arguments = fitted(self._late(worker)), fitted(self._late(worker))
        self._add(worker, *checkpoint(segment, *arguments, use_reentrant=False))


def _scaled(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else each * 0.5 for each in gradients)


_STEPS: dict[Callable[[Run, int], None], int] = {
    Run.compute: 6,
    Run.send: 6,
    Run.call: 4,
    Run.view: 2,
    Run.detach: 1,
    Run.change: 4,
    Run.hook: 2,
    Run.hook_node: 1,
    Run.keep: 2,
    Run.apply: 3,
    Run.recompute: 1,
}
"""The kinds of steps, with the weight at which each is drawn."""
