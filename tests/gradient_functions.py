"""Custom autograd functions that tests of the graph and of the workers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sine(torch.autograd.Function):
    """A user-defined function with a non-tensor argument between two tensors."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, factor: float, second: Tensor) -> Tensor:
        ctx.save_for_backward(first)
        ctx.factor = factor
        return torch.sin(first) * factor + second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        (first,) = ctx.saved_tensors
        return gradient * torch.cos(first) * ctx.factor, None, gradient


class Broken(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no slope here")


class TwoOrOne(torch.autograd.Function):
    """Has a different slope if both of its results were used."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return value * 2, value * 5

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None:
            return None if second is None else second * 5
        return first * 2 if second is None else first * 2 + second * 5 + 10


class Rejoin(torch.autograd.Function):
    """Returns its first argument; the second gets no gradient, only a place in the order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Noted(torch.autograd.Function):
    """Receives zeros where there is no gradient, so that its argument gets a gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1
