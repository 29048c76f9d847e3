"""Placeholders: the tensors that stand for received tensors in the receiver's graph.

They must not be leaves, since programs modify received tensors in place. And a walk must see
where the graph continues on another worker. Both follow from making each placeholder the output of
a node. torch has a suitable node that raises when it is run. Making it takes less than half the
time of a Python function, which is the fallback.

Each tensor has a node of its own. The engine calls the hooks of all outputs of a node that it
runs, with None for missing gradients, so the tensors of a message must not share a node.
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
        # Detached, not a view: a view that a function returns cannot be modified in place.
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
"""The type of placeholder nodes."""


def make_placeholders(tensors: Sequence[Tensor]) -> tuple[list[Node], list[Tensor]]:
    """Makes tensors with the memory of ``tensors``, each the output of a new node.

    Args:
        tensors: Fresh leaves of a differentiable type; their memory moves to the placeholders,
            and the caller must drop them.

    Returns:
        The nodes and the placeholders, in the order of ``tensors``.
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
    """Returns whether a leaf may be a placeholder's, of any context; few other leaves match."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.numel()


def _drop_memory(leaf: Tensor) -> None:
    # The node keeps its leaf as long as the graph lives; the memory can be freed now.
    if leaf.layout is torch.strided:
        leaf.data = _EMPTY if leaf.is_cpu else leaf.new_empty(0)
