"""Runs one node of a graph without the engine.

The engine stops at a node only if nothing that is asked for lies behind it; weights that are used
in every step of a loop always do. So where a graph is cut, the nodes before the cut are run one
by one, as the engine would: tensor hooks on the complete gradient, node hooks, the node itself,
and its results brought into the shape and type of what they are gradients of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from weft.autograd.local_engine import gradients_at

Gradients = tuple[Tensor | None, ...]


def run_node(node: Node, gradients: Mapping[int, Tensor], create_graph: bool = False) -> Gradients:
    """Runs ``node``, once and for all.

    Args:
        node: A node that is no leaf.
        gradients: What has come for its outputs, by output number.
        create_graph: Whether the run itself is recorded.

    Returns:
        A gradient for each of its ``next_functions``, None where there is none.
    """
    with torch.set_grad_enabled(create_graph):
        incoming = _after_tensor_hooks(node, gradients, create_graph)
        for hook in hooks_of(node.register_prehook):
            incoming = _as_tuple(hook(incoming), incoming)
        results = _fitted(node, _apply(node, incoming))
        for hook in hooks_of(node.register_hook):
            results = _as_tuple(hook(results, incoming), results)
        return results


def _after_tensor_hooks(
    node: Node, gradients: Mapping[int, Tensor], create_graph: bool
) -> Gradients:
    # Asked for the gradient at the node where it starts, the engine runs the hooks and no more.
    return gradients_at(
        [GradientEdge(node, output_nr) for output_nr in range(len(_metas(node)))],
        tuple([GradientEdge(node, output_nr) for output_nr in gradients]),
        tuple(gradients.values()),
        retain_graph=True,
        create_graph=create_graph,
    )


def hooks_of(register: Callable[[Callable[..., Any]], Any]) -> list[Callable[..., Any]]:
    """Returns the hooks that ``register``, a method of a node, has put there, in their order."""
    # The only way to the hooks of a node leads through a new one.
    handle = register(_as_tuple)
    try:
        hooks = handle.hooks_dict_ref()
        return [hook for number, hook in hooks.items() if number != handle.id]
    finally:
        handle.remove()


def _as_tuple(results: Any, default: Any = None) -> Any:
    """Returns what a hook returned, as the engine understands it."""
    if results is None:
        return default
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _apply(node: Node, incoming: Gradients) -> Sequence[Tensor | None]:
    if isinstance(node, torch._C._FunctionBase):
        return _apply_function(node, incoming)
    results: Sequence[Tensor | None] = _as_tuple(node(*incoming), ())  # type: ignore[operator]
    return results


def _apply_function(node: Any, incoming: Gradients) -> Sequence[Tensor | None]:
    results = _as_tuple(node.apply(*_materialized(node, incoming)), ())
    # There are results for all arguments of forward, but edges only for those that were tensors.
    wanted = itertools.compress(results, node.needs_input_grad)
    return [None if target is None else next(wanted, None) for target, _ in node.next_functions]


def _materialized(node: Node, incoming: Gradients) -> list[Tensor]:
    return [
        torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
        if gradient is None
        else gradient
        for gradient, meta in zip(incoming, _metas(node), strict=True)
    ]


def _fitted(node: Node, results: Sequence[Tensor | None]) -> Gradients:
    return tuple(
        None if target is None or result is None else _fit(result, _metas(target)[target_nr])
        for result, (target, target_nr) in zip(results, node.next_functions, strict=True)
    )


def _fit(result: Tensor, meta: Any) -> Tensor:
    if result.layout is torch.strided and list(result.shape) != list(meta.shape):
        result = result.sum_to_size(tuple(meta.shape))
    return result.to(device=meta.device, dtype=meta.dtype)


def _metas(node: Any) -> Sequence[Any]:
    metas: Sequence[Any] = node._input_metadata
    return metas
