"""The steps that random programs of both orders of gradients have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.gradient_functions import Noted, Rejoin, Sine, TwoOrOne

V = TypeVar("V")
NAMES = ("v", "w")
"""The parameters of each worker that a program may use."""
OPERATIONS = (
    "sine", "unbind", "product", "layer", "layer", "hooked", "sum", "one of two", "rejoined",
    "recomputed",
)  # fmt: skip


# A step names a value by its age in the body's list; 0 is the last value.


class Compute(NamedTuple):
    """Adds a value computed from two values."""

    operation: str
    first: int
    second: int


class Use(NamedTuple):
    """Adds a parameter of this worker, unchanged."""

    name: str


class Remember(NamedTuple):
    """Feeds a value to the hidden state of this worker, and adds the state."""

    value: int


def at(values: Sequence[V], age: int) -> V:
    return values[-1 - age % len(values)]


def computed(operation: str, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Returns the result of an operation; of those not named here, that of a layer."""
    if operation == "sine":
        result: Tensor = Sine.apply(first, 0.5, second)  # type: ignore[no-untyped-call]
    elif operation == "unbind":
        result = torch.stack([first, second]).unbind()[1] * 0.5
    elif operation == "product":
        result = torch.tanh(first * second.sum())
    elif operation == "sum":
        result = (first + second) / 2
    elif operation == "one of two":
        result = TwoOrOne.apply(first)[1] / 5  # type: ignore[no-untyped-call]
    elif operation == "rejoined":
        result = Rejoin.apply(first, Noted.apply(second))  # type: ignore[no-untyped-call]
    elif operation == "recomputed":
        result = checkpoint(_layer, first, weight, second, use_reentrant=False)
    else:
        result = _layer(first, weight, second)
    return result


def _layer(first: Tensor, weight: Tensor, second: Tensor) -> Tensor:
    return torch.tanh(first * weight + second)
