"""Functions for workers in the tests of ``torchweft.mapreduce.autograd``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from torchweft import rpc
from torchweft.mapreduce import module_clone


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


def steps_its_copy(model: Any, x: Tensor) -> Tensor:
    """Steps the parameters that it was given."""
    (weight,) = model.parameters()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    (weight * x).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return weight.detach()


def steps_a_deep_copy(model: Any, x: Tensor) -> Tensor:
    """Steps a copy that Python makes."""
    return steps_its_copy(copy.deepcopy(model), x)


def steps_a_clone(model: Any, x: Tensor) -> Tensor:
    """Steps leaves of its own."""
    return steps_its_copy(module_clone(model, by="deepcopy"), x)
