"""Placeholders: the tensors that stand for received ones in the receiver's graph.

They must be no leaves, since programs modify received tensors in place, and a walk through the
graph must see where it goes on at another worker. Both follow from making each of them the output
of a node. torch has a node that fits and raises when it is run; making it takes less than half the
time of a Python function, which is the fallback.

Each tensor has a node of its own. The engine calls the hooks of all outputs of a node that it
runs, with None where there is no gradient, so the tensors of a message must not share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

RAN_INTO = (
    "backward reached a tensor that came from another worker; inside the autograd context call "
    "torchweft.autograd.backward(context_id, [loss]), which goes on there, instead of "
    "loss.backward()"
)

_EMPTY = torch.empty(0)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # Detached rather than a view: a view out of a function cannot be modified in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError(RAN_INTO)


def _by_function(leaf: Tensor) -> Tensor:
    apply: Any = _Received.apply
    output: Tensor = apply(leaf)
    return output


def _by_torch(leaf: Tensor) -> Tensor:
    output: Tensor = _delayed_error(RAN_INTO, 1)(leaf)
    return output


_delayed_error: Any = getattr(torch._C._functions, "DelayedError", None)
_output: Callable[[Tensor], Tensor] = _by_function if _delayed_error is None else _by_torch

PLACEHOLDER = type(_output(torch.empty(0, requires_grad=True)).grad_fn)
"""The type of their nodes."""


def make_placeholders(tensors: Sequence[Tensor]) -> tuple[list[Node], list[Tensor]]:
    """Makes tensors with the memory of ``tensors``, each the output of a new node.

    Args:
        tensors: Fresh leaves of a differentiable type; their memory moves to the placeholders,
            and the caller must drop them.

    Returns:
        For each tensor its node, and its placeholder.
    """
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return make_placeholders(tensors)
    nodes: list[Any] = []
    placeholders: list[Tensor] = []
    for tensor in tensors:
        placeholder = _output(tensor.requires_grad_(True))
        nodes.append(placeholder.grad_fn)
        placeholders.append(placeholder)
        _drop_memory(tensor)
    return nodes, placeholders


def is_without_memory(leaf: object) -> bool:
    """Whether a leaf may be behind a placeholder, of whatever context; few others are like it."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.numel()


def _drop_memory(leaf: Tensor) -> None:
    # The node keeps its leaf for as long as the context lives; the memory need not stay.
    if leaf.layout is torch.strided:
        leaf.data = _EMPTY if leaf.is_cpu else leaf.new_empty(0)
