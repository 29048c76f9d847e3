"""Functions that the workers of the autograd tests run, and queries of their state."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchweft
from tests.gradient_functions import Broken
from torchweft import rpc
from torchweft.errors import AutogradError

_lock = threading.Lock()
_parameters: dict[str, torch.nn.Parameter] = {}
_gates: dict[str, threading.Event] = {}


# Parameters


def initial(worker: str, name: str, *shape: int) -> torch.nn.Parameter:
    """Returns a new parameter, the same for the same names in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{worker} {name}".encode()))
    return torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))


def parameter(name: str, *shape: int) -> torch.nn.Parameter:
    """Returns a parameter of this worker, made at its first use."""
    with _lock:
        if name not in _parameters:
            me = rpc.get_worker_info().name
            _parameters[name] = initial(me, name, *(shape or (3,)))
        return _parameters[name]


def gradients(context_id: int) -> dict[str, Tensor]:
    """Returns the gradients of this worker's parameters; empty if it did not take part."""
    try:
        found = torchweft.autograd.get_gradients(context_id)
    except AutogradError:
        return {}
    return {name: found[tensor] for name, tensor in _parameters.items() if tensor in found}


# Functions to call


def layer(value: Tensor, name: str = "w") -> Tensor:
    return torch.tanh(value * parameter(name))


def scaled(factor: float) -> Tensor:
    return parameter("w") * factor


def add(first: Any, second: Any) -> Tensor:
    """Adds the exponential of the second tensor to the first; either may be a reference."""
    values = [each.to_here() if isinstance(each, rpc.RRef) else each for each in (first, second)]
    return values[0] + values[1].exp()


def total(reference: rpc.RRef[Tensor]) -> Tensor:
    return reference.to_here().sum()


def recurse(depth: int, value: Tensor, me: str, other: str) -> Tensor:
    """Computes layers on two workers in turn, each in a call nested in the previous call."""
    if depth == 0:
        return value
    inner: Tensor = rpc.rpc_sync(other, recurse, (depth - 1, layer(value), other, me))
    return inner + value


def change_in_place(value: Tensor) -> Tensor:
    value.mul_(3).add_(parameter("w"))
    return value.exp()


def describe_argument(value: Tensor) -> tuple[bool, bool, bool, Tensor]:
    is_parameter = isinstance(value, torch.nn.Parameter)
    return is_parameter, value.requires_grad, value.is_leaf, value * parameter("w")


def look_up(indices: list[int]) -> Tensor:
    return torch.nn.functional.embedding(
        torch.tensor(indices), parameter("table", 5, 3), sparse=True
    )


def plain_backward(value: Tensor) -> None:
    layer(value).sum().backward()


@rpc.async_execution
def layer_of_other(value: Tensor, other: str) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async(other, layer, (value,)).then(lambda done: done.wait() * parameter("v"))


async def layers_in_turn(value: Tensor, other: str) -> Tensor:
    await asyncio.sleep(0)
    first = await rpc.rpc_async(other, layer, (value,))
    await asyncio.sleep(0)
    second: Tensor = await rpc.rpc_async(other, layer, (first * parameter("v"),))
    return second


class Decoder:
    """Keeps its hidden state from call to call."""

    def __init__(self) -> None:
        self.hidden = parameter("hidden") * 1

    def step(self, token: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.hidden * parameter("cell") + token)
        return self.hidden * parameter("out")


class Meeting(torch.autograd.Function):
    """Its backward on a worker ends only after its backward on the other worker has begun."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str, other: str) -> Tensor:
        ctx.name, ctx.other = name, other
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rpc.rpc_sync(ctx.other, open_gate, (ctx.name,))
        assert gate(ctx.name).wait(20), "the other backward has not begun"
        return gradient, None, None


def meet(value: Tensor, name: str, other: str) -> Tensor:
    result: Tensor = Meeting.apply(layer(value), name, other)  # type: ignore[no-untyped-call]
    return result


# Functions that fail in backward


class Fatal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient


def broken(value: Tensor) -> Tensor:
    result: Tensor = Broken.apply(value)  # type: ignore[no-untyped-call]
    return result


def fatal(value: Tensor) -> Tensor:
    result: Tensor = Fatal.apply(value)  # type: ignore[no-untyped-call]
    return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pass_to(other: str, function: Any, value: Tensor) -> Tensor:
    """Computes a layer here, then a function on another worker, then a layer here."""
    return layer(rpc.rpc_sync(other, function, (layer(value),)))


# Calls that last as long as a test wants


def gate(name: str) -> threading.Event:
    with _lock:
        return _gates.setdefault(name, threading.Event())


def layer_behind_gate(value: Tensor, name: str, other: str) -> Tensor:
    assert gate(name).wait(20)
    result: Tensor = rpc.rpc_sync(other, layer, (layer(value),))
    return result


def open_gate(name: str) -> None:
    gate(name).set()


# Leftovers


def footprint() -> dict[str, int]:
    """Returns how much this worker holds: objects, threads, descriptors, and memory."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_kib": resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }
