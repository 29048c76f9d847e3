"""Functions for workers in the tests of passes outside of contexts."""

from __future__ import annotations

import gc
import threading

import torch
from torch import Tensor, nn

import torchweft
from torchweft import rpc

weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
kept: list[Tensor] = []
began = threading.Event()


def layer(value: Tensor) -> Tensor:
    return value * weight


def layers(value: Tensor) -> dict[str, Tensor]:
    hidden = torch.tanh(value * weight)
    return {"used": hidden * 2, "unused": hidden.exp()}


def relay(to: str, value: Tensor) -> Tensor:
    return rpc.rpc_sync(to, layer, (value * weight,)) + weight


def keep(value: Tensor) -> Tensor:
    kept[:] = [torch.tanh(value * weight)]
    return kept[0] * 1


def forget() -> None:
    kept.clear()
    weight.grad = None
    gc.collect()  # An error and the frames of its traceback are a cycle.


def use_kept(factor: Tensor) -> Tensor:
    return kept[0] * factor


def train(value: Tensor) -> Tensor:
    """Runs a backward pass from a loss of this worker to the caller."""
    loss = (value * weight).sum()
    torchweft.autograd.backward(loss)
    return loss.detach()


async def step_in_a_context(to: str, value: Tensor) -> bool:
    """Awaits within a context; returns whether the context was still current afterwards."""
    with torchweft.autograd.context() as context_id:
        value = await rpc.rpc_async(to, layer, (value,))
        is_same = torchweft.autograd.current_context_id() == context_id
        torchweft.autograd.backward(context_id, [value.sum()])
    return is_same


def broken(value: Tensor) -> Tensor:
    return Broken.apply(value * weight)  # type: ignore[no-untyped-call, no-any-return]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        raise ValueError("broken on purpose")


def get_weight() -> Tensor:
    return weight


def take_gradient() -> Tensor | None:
    """Returns ``.grad`` of the weight here, and clears it."""
    gradient, weight.grad = weight.grad, None
    return gradient


def gradient_in(context_id: int) -> Tensor | None:
    return torchweft.autograd.get_gradients(context_id).get(weight)
