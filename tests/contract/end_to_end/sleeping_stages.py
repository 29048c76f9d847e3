"""Stages that sleep instead of computing: their timelines are known, and need no core."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class SleepOnWay(torch.autograd.Function):
    """Passes a value on; its forward and its backward sleep."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """A stage whose forward takes one unit, and each half of its backward another.

    The half for the input and that for the weight are different nodes of the graph, so that a
    schedule can run them apart. The first stage, whose input needs no gradient, sleeps as long: the
    bias comes before the input's node.
    """

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.weight = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        passed = SleepOnWay.apply(inputs + self.bias, self.unit_s, self.unit_s)
        weight = SleepOnWay.apply(self.weight, 0.0, self.unit_s)
        result: Tensor = passed + weight
        return result
