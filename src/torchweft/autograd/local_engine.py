"""The calls that Weft makes to torch's autograd engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

# torch.autograd.grad checks shapes with the symbolic ones of torch.fx, whose first import takes
# 0.3 s, and half of the time of a small call after that. The shapes are known to be right here.
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def gradients_at(
    inputs: Iterable[GradientEdge],
    edges: tuple[GradientEdge, ...],
    gradients: tuple[Tensor, ...],
    *,
    retain_graph: bool,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Runs a graph from edges with gradients to other edges.

    Args:
        inputs: Where gradients are wanted; nothing behind them is run.
        edges: Where the graph starts.
        gradients: The gradients there, of the right shapes.
        retain_graph: Whether what the nodes keep must survive.
        create_graph: Whether the run itself is recorded.

    Returns:
        A gradient for each of ``inputs``, None where none arrives.
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

    Hooks of the leaves run, and those of the nodes that accumulate, which wait for collectives.
    """
    if _engine is None:
        torch.autograd.backward(leaves, gradients)
        return
    _engine.run_backward(leaves, gradients, False, False, (), True, accumulate_grad=True)
