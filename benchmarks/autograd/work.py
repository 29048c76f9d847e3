"""The measured passes: one program for either library, and the graph in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.autograd.shapes import SHAPES, Shape
from benchmarks.frame.api import Api, current
from benchmarks.frame.work import Work

__all__ = ["local_works", "works"]

# The importing worker's own parameter: calls multiply by it, so that a gradient ends there.
PARAMETER = torch.ones(2, requires_grad=True)


def visit(value: Tensor, workers: tuple[str, ...], nodes: int) -> Tensor:
    """Adds nodes to the graph, then calls the first of ``workers``; called remotely."""
    value = grown(value, nodes)
    if workers:
        value = current().rpc.rpc_sync(workers[0], visit, args=(value, workers[1:], nodes))
    return value


def grown(value: Tensor, nodes: int) -> Tensor:
    """Returns the product with this worker's parameter, followed by ``nodes`` more nodes."""
    value = value * PARAMETER
    for _ in range(nodes):
        value = value * 1.0
    return value


class DistributedPass:
    """Forward and backward passes over one shape, in contexts of a library.

    Args:
        api: The library.
        shape: The calls of the forward pass.
        options: Arguments of ``backward``.
    """

    def __init__(self, api: Api, shape: Shape, **options: Any) -> None:
        self._api = api
        self._shape = shape
        self._options = options
        self._root = torch.ones(2, requires_grad=True)

    def step(self) -> None:
        """Runs both passes."""
        with self._api.autograd.context() as context_id:
            self._backward(context_id, self._forward())

    def backward_alone(self) -> Work:
        """Returns a work that times the backward pass only."""
        passes = self._passes()
        return Work(lambda: next(passes), prepare=lambda: next(passes), finish=lambda: next(passes))

    def _passes(self) -> Iterator[None]:
        """Yields after each forward pass, each backward pass, and each end of a context."""
        while True:
            with self._api.autograd.context() as context_id:
                loss = self._forward()
                yield
                self._backward(context_id, loss)
                yield
            yield

    def _forward(self) -> Tensor:
        root, rpc, nodes = self._root * 1.0, self._api.rpc, self._shape.nodes
        calls = [
            rpc.rpc_async(branch[0], visit, args=(root, branch[1:], nodes))
            for branch in self._shape.branches
        ]
        return _loss([call.wait() for call in calls])

    def _backward(self, context_id: int, loss: Tensor) -> None:
        self._api.autograd.backward(context_id, [loss], **self._options)


def _loss(values: list[Tensor]) -> Tensor:
    # Use all results: torch's backward pass never ends if the result of a call is unused.
    return torch.stack(values).sum()


def works(api: Api) -> dict[str, Work]:
    """Returns the passes over all shapes that need a group of this size."""
    # torch has no other mode, so both works are the same program there.
    fast = {"mode": "fast"} if api.package == "torchweft" else {}
    found = {}
    for name, shape in SHAPES.items():
        if shape.size == api.size:
            found[f"step {name}"] = Work(DistributedPass(api, shape).step)
            found[f"backward {name}"] = DistributedPass(api, shape).backward_alone()
            found[f"fast {name}"] = DistributedPass(api, shape, **fast).backward_alone()
    return found


def local_works() -> dict[str, Work]:
    """Returns the passes over the same graphs with no call in between."""
    found = {}
    for name, shape in SHAPES.items():
        local = LocalPass(shape)
        found[f"step {name}"] = Work(local.step)
        found[f"backward {name}"] = Work(local.backward, prepare=local.forward)
        found[f"fast {name}"] = found[f"backward {name}"]
    return found


class LocalPass:
    """The graph of a shape in one process, with torch's own engine."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._root = torch.ones(2, requires_grad=True)

    def step(self) -> None:
        self.forward()
        self.backward()

    def forward(self) -> None:
        root = self._root * 1.0
        self._loss = _loss([self._visit(root, branch) for branch in self._shape.branches])

    def backward(self) -> None:
        torch.autograd.backward(self._loss)

    def _visit(self, value: Tensor, workers: tuple[str, ...]) -> Tensor:
        for _ in workers:
            value = grown(value, self._shape.nodes)
        return value
