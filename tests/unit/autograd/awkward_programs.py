"""Programs over three workers that use rare features of autograd.

They hook unused tensors, change tensors that share memory in place, and have custom functions that
get, or return, no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.gradient_functions import Noted, Rejoin, TwoOrOne
from tests.unit.autograd.cluster import World


def tensor_and_view_in_one_message(world: World) -> list[Tensor]:
    base = world.parameter(0, "x", 3) * 1
    received, view = world.send(0, 1, base, base[:2])
    received.mul_(3)
    return [world.send(1, 0, view * view)[0].sum()]


def overlapping_views_in_one_answer(world: World) -> list[Tensor]:
    base = world.parameter(1, "x", 4).exp()
    first, second, whole = world.send(1, 0, base[:3], base[1:], base.view(2, 2))
    second.mul_(2)
    whole[0] = whole[1] * 3
    first.add_(second)
    return [(first * second).sum() + whole.prod()]


def tensor_and_detached_one(world: World) -> list[Tensor]:
    value = world.parameter(0, "x", 3) * 2
    received, alias = world.send(0, 1, value, value.detach())
    made = received * received
    alias.zero_()
    return [world.send(1, 0, made * received + alias)[0].sum()]


def two_leaves_on_one_memory(world: World) -> list[Tensor]:
    leaf = world.parameter(0, "x", 3)
    other = leaf.detach().requires_grad_()
    received, twin = world.send(0, 1, leaf, other)
    received.mul_(2)
    return [world.send(1, 0, received * twin)[0].sum()]


def hook_on_what_is_not_used(world: World) -> list[Tensor]:
    used, unused = world.send(0, 1, world.parameter(0, "x", 3) * 2, world.parameter(0, "y", 3) * 3)
    unused.register_hook(lambda gradient: gradient * 2)
    used.register_hook(lambda gradient: gradient * 2)
    return [world.send(1, 0, used.exp())[0].sum()]


def function_that_tells_zero_from_nothing(world: World) -> list[Tensor]:
    weight = world.parameter(0, "w", 3)
    weight.register_hook(lambda gradient: gradient)  # Joins two sends in one component.
    there = world.send(0, 1, weight)[0]
    back = world.send(1, 0, there.exp())[0]
    return [(TwoOrOne.apply(weight.exp())[1] + back).sum()]


class WithMask(torch.autograd.Function):
    """Returns a non-differentiable result of another shape between two differentiable results."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.stack([value, value]) > 0
        ctx.mark_non_differentiable(mask)
        return value * 2, mask, value * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, mask: Tensor, third: Tensor) -> Tensor:
        assert mask.shape == (2, 3)
        return first * 2 + third * 3 + mask.sum()


def results_without_gradients_before_a_cut(world: World) -> list[Tensor]:
    state = world.parameter(1, "s", 3) * 2
    first, mask, _ = WithMask.apply(state)
    sent = world.send(1, 0, state, first * mask[0])
    fed = world.send(0, 1, sent[0].sin())[0]
    return [world.send(1, 0, fed * state)[0].sum() + sent[1].sum()]


class Recompute(torch.autograd.Function):
    """Prepares, without a gradient, the state that ``Recomputed`` needs."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, done: list[str]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.done = done
        return phony.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        assert gradient is None
        ctx.done.append("recomputed")
        return None, None


class Recomputed(torch.autograd.Function):
    """Fails unless ``Recompute`` has run before."""

    @staticmethod
    def forward(ctx: Any, done: list[str], value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.done = done
        return value[:2] * 2, value[2:] * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        assert ctx.done
        return None, torch.cat([first * 2, second * 3])


def recomputation_in_pieces(world: World) -> list[Tensor]:
    """Part of worker 1's graph, down to ``Recompute``, runs before the rest can."""
    done: list[str] = []
    first, second = Recomputed.apply(done, world.send(0, 1, world.parameter(0, "x", 4) * 1)[0])
    ordered = Rejoin.apply(first, Recompute.apply(first * 1, done))
    there = world.send(1, 0, second)[0]
    back = world.send(0, 1, there * 2)[0]
    return [world.send(1, 0, ordered + back)[0].sum()]


def remote_result_without_gradient(world: World) -> list[Tensor]:
    received, other = world.send(0, 1, world.parameter(0, "x", 3) * 1, world.parameter(0, "y", 3))
    made = Noted.apply(received * world.parameter(1, "w", 3))
    results = world.send(1, 0, made, other * world.parameter(1, "v", 3))
    return [Rejoin.apply(world.parameter(0, "z", 3) * 2, results[0]).sum()]


def remote_results_of_which_one_has_a_gradient(world: World) -> list[Tensor]:
    received, other = world.send(0, 1, world.parameter(0, "x", 3) * 1, world.parameter(0, "y", 3))
    made = Noted.apply(received * world.parameter(1, "w", 3))
    phony, used, _ = world.send(1, 0, made, other * world.parameter(1, "v", 3), received + other)
    return [Rejoin.apply(used.exp(), phony).sum()]


def nothing_for_what_others_share(world: World) -> list[Tensor]:
    """A node that also waits for another message gets no gradient."""
    state = Noted.apply(world.parameter(1, "s", 3) * 2)
    first, second = world.send(1, 0, state)[0], world.send(1, 0, state * 3)[0]
    fed = world.send(0, 1, Rejoin.apply(second, first))[0]
    last = world.send(1, 0, fed * world.parameter(1, "w", 3))[0]
    return [Rejoin.apply(last, world.send(1, 0, Noted.apply(state * fed))[0]).sum()]


def parameters_frozen_after_their_use(world: World) -> list[Tensor]:
    """One was used in a function, one was sent itself, and one in a part of two messages."""
    frozen = [world.parameter(1, name, 3) for name in "abc"]
    used, shared = frozen[0] * world.parameter(1, "w", 3), frozen[2].exp()
    received = world.send(1, 0, used, frozen[1])
    more = world.send(1, 0, shared)[0] * world.send(1, 0, shared * world.parameter(1, "v", 3))[0]
    for each in frozen:
        each.requires_grad_(False)
    return [(received[0] * received[1] * more).sum()]


ALL = [
    tensor_and_view_in_one_message, overlapping_views_in_one_answer, tensor_and_detached_one,
    two_leaves_on_one_memory, hook_on_what_is_not_used, function_that_tells_zero_from_nothing,
    results_without_gradients_before_a_cut, recomputation_in_pieces,
    remote_result_without_gradient, remote_results_of_which_one_has_a_gradient,
    nothing_for_what_others_share, parameters_frozen_after_their_use,
]  # fmt: skip
