"""Functions that the workers of the higher-order tests run, and queries of their state."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import torchweft
from tests import higher_order_sites
from tests.contract.processes import autograd_functions
from tests.gradient_functions import Broken
from tests.higher_order_sites import WORKERS, Outcome, Program, Site, Tensors
from torchweft import rpc

_lock = threading.Lock()
_sites: dict[int, RealSite] = {}
_watched: list[weakref.ref[Any]] = []
_notes: list[Any] = []


# Programs on real workers


class RealSite(Site):
    """This worker, in one context."""

    def __init__(self, context_id: int) -> None:
        self.worker = rpc.get_worker_info().id
        self.context_id = context_id
        self.state = {}
        self.parameters: dict[str, torch.nn.Parameter] = {}

    def parameter(self, name: str, *shape: int) -> torch.nn.Parameter:
        with _lock:
            if name not in self.parameters:
                made = higher_order_sites.initial(self.worker, name, *(shape or (3,)))
                self.parameters[name] = made
            return self.parameters[name]

    def start(
        self, worker: int, function: Callable[..., Any], *arguments: Any
    ) -> Callable[[], Any]:
        wait: Callable[[], Any] = rpc.rpc_async(worker, serve, (function, arguments)).wait
        return wait

    def grad(
        self, outputs: Tensors, inputs: Tensors, grad_outputs: Any = None, **options: Any
    ) -> tuple[Tensor, ...]:
        return torchweft.autograd.grad(self.context_id, outputs, inputs, grad_outputs, **options)

    def backward(
        self,
        roots: Sequence[Tensor],
        grad_tensors: Sequence[Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        torchweft.autograd.backward(self.context_id, roots, grad_tensors=grad_tensors, **options)

    def gradients(self) -> dict[str, Tensor]:
        found = torchweft.autograd.get_gradients(self.context_id)
        return {name: found[leaf] for name, leaf in self.parameters.items() if leaf in found}


def site_here() -> RealSite:
    """Returns this worker's site in the context of the running code."""
    context_id = torchweft.autograd.current_context_id()
    with _lock:
        if context_id not in _sites:
            _sites[context_id] = RealSite(context_id)
        return _sites[context_id]


def serve(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Runs a function of a program here."""
    return function(site_here(), *arguments)


def table_here(context_id: int) -> dict[str, Tensor]:
    """Returns the gradients of this worker's parameters, and forgets the program."""
    with _lock:
        site = _sites.pop(context_id, None)
    if site is None:
        return {}
    assert all(parameter.grad is None for parameter in site.parameters.values())
    return {name: gradient.detach() for name, gradient in site.gradients().items()}


def run_on_workers(program: Program) -> Outcome:
    """Runs a program with this worker as its leader."""
    with torchweft.autograd.context() as context_id:
        results = list(program(site_here()))
        tables = {
            (worker, name): gradient
            for worker in range(WORKERS)
            for name, gradient in rpc.rpc_sync(worker, table_here, (context_id,)).items()
        }
        return results, tables


# Functions of single tests

parameter = autograd_functions.parameter
layer = autograd_functions.layer


class OnceOnly(torch.autograd.Function):
    """Its backward pass cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return gradient * value.exp()


class _BrokenInBackward(torch.autograd.Function):
    """Its backward works; differentiating that backward fails."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        made: Tensor = Broken.apply(gradient * value.exp())  # type: ignore[no-untyped-call]
        return made


class _FatalInBackward(torch.autograd.Function):
    """Its backward works; differentiating that backward kills the process."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        made: Tensor = autograd_functions.Fatal.apply(gradient * value.exp())  # type: ignore[no-untyped-call]
        return made


def once_only(value: Tensor) -> Tensor:
    made: Tensor = OnceOnly.apply(value)  # type: ignore[no-untyped-call]
    return made


def broken_at_second(value: Tensor) -> Tensor:
    made: Tensor = _BrokenInBackward.apply(value)  # type: ignore[no-untyped-call]
    return made


def fatal_at_second(value: Tensor) -> Tensor:
    made: Tensor = _FatalInBackward.apply(value)  # type: ignore[no-untyped-call]
    return made


def gradient_through(other: str, function: Any, value: Tensor) -> Tensor:
    """Returns the gradient, with a graph, of a result of another worker."""
    result = rpc.rpc_sync(other, function, (layer(value),))
    (gradient,) = torchweft.autograd.grad(
        torchweft.autograd.current_context_id(), result.sum(), value, create_graph=True
    )
    return gradient


def broken_beside(value: Tensor) -> Tensor:
    """Returns a result that depends on a parameter here only: no gradient of ``value`` needs it."""
    made: Tensor = Broken.apply(parameter("v"))  # type: ignore[no-untyped-call]
    return made + value.detach()


def affine(module: torch.nn.Module, value: Tensor) -> Tensor:
    result: Tensor = module(value)
    return result


def is_parameter(value: Tensor) -> tuple[bool, Tensor]:
    return isinstance(value, torch.nn.Parameter), value.pow(3) * parameter("w")


def power(value: Tensor) -> Tensor:
    return value.pow(3)


def note_calls(value: Tensor) -> Tensor:
    """Computes a layer with a hook, which notes each gradient that it gets."""
    made = layer(value)
    made.register_hook(lambda gradient: _notes.append(gradient.detach().clone()))
    return made * 2 + made.sin()


def take_notes() -> list[Any]:
    notes = list(_notes)
    _notes.clear()
    return notes


def watch_gradients(context_id: int) -> int:
    """Watches the gradients of a context on this worker; returns how many objects are watched."""
    found = torchweft.autograd.get_gradients(context_id).values()
    _watched.extend(weakref.ref(gradient) for gradient in found)
    return len(_watched)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, kept: Tensor) -> Tensor:
        ctx.kept = kept
        return value * kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.kept, None


def watch_nodes(value: Tensor) -> Tensor:
    """Computes a result whose graph keeps a watched tensor alive."""
    kept = torch.ones(3, dtype=torch.float64)
    _watched.append(weakref.ref(kept))
    made: Tensor = _Times.apply(layer(value), kept)  # type: ignore[no-untyped-call]
    return made


def count_watched() -> int:
    """Returns how many of the watched objects are alive."""
    return sum(each() is not None for each in _watched)


def forget_watched() -> None:
    _watched.clear()


def context_id_here() -> int:
    return torchweft.autograd.current_context_id()


async def context_id_after_waiting(other: str) -> tuple[int, int]:
    theirs = await rpc.rpc_async(other, context_id_here)
    return theirs, torchweft.autograd.current_context_id()


def descend(weights: Tensor, other: str, steps: int) -> Tensor:
    """An inner loop as a user would write it."""
    context_id = torchweft.autograd.current_context_id()
    for _ in range(steps):
        loss = rpc.rpc_sync(other, quadratic, (weights,))
        (gradient,) = torchweft.autograd.grad(context_id, [loss], [weights], create_graph=True)
        weights = weights - 0.1 * parameter("rate") * gradient
    return weights


def quadratic(weights: Tensor) -> Tensor:
    return ((weights.sin() - parameter("goal")) ** 2).sum()


def model_of_descent(weights: Tensor, rate: Tensor, goal: Tensor, steps: int) -> Tensor:
    """Computes the result of ``descend`` in one process."""
    for _ in range(steps):
        loss = ((weights.sin() - goal) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
        weights = weights - 0.1 * rate * gradient
    return weights


class RemoteBackward(torch.autograd.Function):
    """Its backward pass calls another worker."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: str) -> Tensor:
        ctx.save_for_backward(value)
        ctx.other = other
        return value.pow(4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        return gradient * rpc.rpc_sync(ctx.other, power, (value,)), None


def with_remote_backward(value: Tensor, other: str) -> Tensor:
    made: Tensor = RemoteBackward.apply(value, other)  # type: ignore[no-untyped-call]
    return made


def large(count: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, count, dtype=torch.float64)


def sine_of_large(value: Tensor) -> Tensor:
    return (value * large(value.numel()).reshape(value.shape)).sin()
