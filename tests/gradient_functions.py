"""Custom autograd functions that tests of the graph and of the workers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sine(torch.autograd.Function):
    """A function of the user's, with an argument between tensors that is none."""

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
