"""Placeholders: the tensors that stand for received ones in the receiver's graph.

They must be no leaves, since programs modify received tensors in place, and a walk through the
graph must see where it goes on at another worker. Both follow from making all tensors of a
message the outputs of one node. torch has a node that fits and raises when it is run; making it
takes less than half the time of a Python function, which is the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

RAN_INTO = (
    "backward reached a tensor that came from another worker; inside the autograd context call "
    "weft.autograd.backward(context_id, [loss]), which goes on there, instead of loss.backward()"
)

_EMPTY = torch.empty(0)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Detached rather than views: views out of a function cannot be modified in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise RuntimeError(RAN_INTO)


def _by_function(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    outputs: tuple[Tensor, ...] = _Received.apply(*leaves)  # type: ignore[no-untyped-call]
    return outputs


def _by_torch(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    outputs = _delayed_error(RAN_INTO, len(leaves))(*leaves)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


_delayed_error: Any = getattr(torch._C._functions, "DelayedError", None)
_outputs: Callable[[Sequence[Tensor]], Sequence[Tensor]] = (
    _by_function if _delayed_error is None else _by_torch
)


def make_placeholders(tensors: Sequence[Tensor]) -> tuple[Node, Sequence[Tensor]]:
    """Makes tensors with the memory of ``tensors`` that are all outputs of one new node.

    Args:
        tensors: Fresh leaves of a differentiable type; their memory moves to the placeholders,
            and the caller must drop them.

    Returns:
        The node, and one placeholder for each tensor.
    """
    leaves = [tensor.requires_grad_(True) for tensor in tensors]
    if torch.is_grad_enabled():
        placeholders = _outputs(leaves)
    else:
        with torch.enable_grad():
            placeholders = _outputs(leaves)
    for leaf in leaves:
        _drop_memory(leaf)
    node = placeholders[0].grad_fn
    assert node is not None
    return node, placeholders


def is_without_memory(leaf: object) -> bool:
    """Whether a leaf may be behind a placeholder, of whatever context; few others are like it."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.numel()


def _drop_memory(leaf: Tensor) -> None:
    # The node keeps its leaves for as long as the context lives; their memory need not stay.
    if leaf.layout is torch.strided:
        leaf.data = _EMPTY if leaf.is_cpu else leaf.new_empty(0)
