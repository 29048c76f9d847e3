"""Functions for workers in the tests of ``torchweft.mapreduce.autograd``."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft import rpc


def product(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum()


_weight = torch.nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))


def with_own_weight(value: Tensor) -> Tensor:
    return (value * _weight).sum()


def ask_for_weight(value: Tensor) -> Tensor:
    """Makes a nested call, whose result this worker receives, not its caller."""
    return rpc.rpc_sync("worker1", with_own_weight, (value,))


def gradient_of_weight(context_id: int) -> Tensor | None:
    from torchweft import autograd

    return autograd.get_gradients(context_id).get(_weight)


def grad_of_weight() -> Tensor | None:
    return _weight.grad
