"""Helpers of the programs: methods of remote objects, and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.frame.api import current

api = current()
SEED = 1


def call_method(method: Callable[..., Any], reference: Any, *args: object) -> Any:
    """Calls a method of the object that ``reference`` refers to; runs on its owner."""
    return method(reference.local_value(), *args)


def remote_method(method: Callable[..., Any], reference: Any, *args: object) -> Any:
    """Calls a method of a remote object, and waits for its result."""
    return api.rpc.rpc_sync(reference.owner(), call_method, args=(method, reference, *args))


def remote_method_async(method: Callable[..., Any], reference: Any, *args: object) -> Any:
    """Calls a method of a remote object, and returns a future of its result."""
    return api.rpc.rpc_async(reference.owner(), call_method, args=(method, reference, *args))


def references_to_parameters(module: torch.nn.Module) -> list[Any]:
    """Returns a reference to each parameter of a module of this worker."""
    return [api.rpc.RRef(parameter) for parameter in module.parameters()]


def seed_all() -> None:
    """Seeds the random numbers of all workers of the group."""
    seed(SEED)
    for number, peer in enumerate(api.peers, start=1):
        api.rpc.rpc_sync(peer, seed, args=(SEED + number,))


def seed(number: int) -> None:
    torch.manual_seed(number)
