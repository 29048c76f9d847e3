"""The calls that Weft makes to torch's autograd engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

# torch.autograd.grad checks shapes with torch.fx's symbolic shapes. Their first import takes 0.3 s,
# and the check takes half the time of a small call. Here the shapes are known to be right.
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def gradients_at(
    inputs: Iterable[GradientEdge],
    edges: tuple[GradientEdge, ...],
    gradients: tuple[Tensor, ...],
    *,
    retain_graph: bool,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Runs a graph from edges with gradients to requested edges.

    Args:
        inputs: Edges whose gradients are wanted; nothing behind them runs.
        edges: Edges at which the run starts.
        gradients: The gradients there, of the right shapes.
        retain_graph: Whether the saved tensors of the nodes must survive.
        create_graph: Whether the run itself is recorded.

    Returns:
        A gradient for each of ``inputs``, or None if none arrives.
    """
    if _engine is None:
        return torch.autograd.grad(
            edges,
            tuple(inputs),
            gradients,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    captured: tuple[Tensor | None, ...] = _engine.run_backward(
        edges, gradients, retain_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )
    return captured


def accumulate(leaves: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Adds gradients to ``.grad`` of leaves, as a pass through their graph would.

    Runs the hooks of the leaves and of the accumulating nodes; the latter wait for collectives.
    """
    if _engine is None:
        torch.autograd.backward(leaves, gradients)
        return
    _engine.run_backward(leaves, gradients, False, False, (), True, accumulate_grad=True)
