"""The calls that Weft makes to torch's autograd engine, and to hooks that the engine leaves out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.gradients import Sink
from torchweft.runtime.device_streams import Mark, mark, use

# torch.autograd.grad checks shapes with torch.fx's symbolic shapes. Their first import takes 0.3 s,
# and the check takes half the time of a small call. Here the shapes are known to be right.
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


_new_edge: Any = functools.partial(tuple.__new__, GradientEdge)
_FIRST_OUTPUT = [itertools.repeat(each) for each in (0, *GradientEdge._field_defaults.values())]


def edges_at(nodes: Iterable[Node]) -> list[GradientEdge]:
    """Returns the edges to the first output of each node."""
    # Without a step of Python for each: a module may have a thousand leaves.
    return list(map(_new_edge, zip(nodes, *_FIRST_OUTPUT, strict=False)))


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


def accumulate(
    tensors: tuple[Any, ...], gradients: tuple[Tensor, ...], leaves: tuple[Tensor, ...] = ()
) -> None:
    """Runs the graph behind tensors, and adds to ``.grad`` of its leaves. The graph is freed.

    Runs the hooks of the leaves and of the accumulating nodes; the latter wait for collectives.

    Args:
        tensors: Tensors or edges at which the run starts; a leaf gets its gradient itself.
        gradients: The gradients there, of the right shapes.
        leaves: The leaves that get a gradient; all if empty.
    """
    if _engine is None:
        torch.autograd.backward(tensors, gradients, inputs=leaves or None)
        return
    _engine.run_backward(tensors, gradients, False, False, leaves, True, accumulate_grad=True)


# Single nodes. The engine stops at a node only if no requested target lies behind it; weights that
# are used in every step of a loop always do. So where a graph is cut, the nodes before the cut run
# one by one. The engine runs each of them with its usual steps: tensor hooks on the complete
# gradient, the node's hooks, zeros for missing gradients if the node wants them, and conversion of
# each result to the shape and type of its tensor. The last hook of the node takes the results and
# ends the run.
#
# Several threads may run the same node of a retained graph at once, and each runs the hooks of the
# other threads. On the CPU a node runs in the calling thread, so a hook recognises its own run by
# thread. On other devices a node runs in a thread of the engine, so a lock serializes such runs.

Gradients = tuple[Tensor | None, ...]


class _HasRun(BaseException):
    """Ends a run after its node; user code never sees it."""


def run_node(node: Node, gradients: Mapping[int, Tensor], create_graph: bool = False) -> Gradients:
    """Runs ``node`` once.

    Args:
        node: A node that is not a leaf.
        gradients: The gradients of its outputs, by output number; empty if every node that leads
            to it ran and left no gradient.
        create_graph: Whether the run itself is recorded.

    Returns:
        A gradient, or None, for each of its ``next_functions``.
    """
    behind = [GradientEdge(target, nr) for target, nr in node.next_functions if target is not None]
    if not behind:
        return (None,) * len(node.next_functions)
    results: list[Gradients] = []
    marks: list[Mark | None] = []
    caller = get_ident()
    is_on_cpu = _meta_of(node).device.type == "cpu"

    def is_own_run() -> bool:
        return not is_on_cpu or get_ident() == caller

    def take(after: Gradients, _: Gradients) -> None:
        if is_own_run():
            if not is_on_cpu:
                # The engine makes its caller's streams wait at the end of a run. This run fails.
                marks.append(mark(_meta_of(node).device.index))
            results.append(after)
            raise _HasRun

    with contextlib.nullcontext() if is_on_cpu else _one_elsewhere:
        handles = [node.register_hook(take)]
        if not gradients:
            handles.append(_without_gradients(node, is_own_run))
            gradients = {0: _zeros(node)}
        try:
            gradients_at(
                behind,  # The engine computes only the requested results of a node.
                tuple([GradientEdge(node, output_nr) for output_nr in gradients]),
                tuple(gradients.values()),
                retain_graph=True,
                create_graph=create_graph,
            )
        except _HasRun:
            if marks:
                use(marks[0], results[0])
            return results[0]
        finally:
            for handle in handles:
                handle.remove()
    raise AssertionError(f"the engine did not run {node.name()}")


_one_elsewhere = threading.RLock()
"""Held while a node runs on a device that is not the CPU."""


def _meta_of(node: Any) -> Any:
    return node._input_metadata[0]


def _zeros(node: Node) -> Tensor:
    meta = _meta_of(node)
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def _without_gradients(node: Node, is_own_run: Callable[[], bool]) -> Any:
    """Removes the gradient that the engine needs to start, so that the node's hooks see none."""

    def take_away(incoming: tuple[Any, ...]) -> tuple[None, ...] | None:
        return (None,) * len(incoming) if is_own_run() else None

    handle = node.register_prehook(take_away)
    hooks: Any = handle.hooks_dict_ref()
    hooks.move_to_end(handle.id, last=False)
    return handle


def hooks_of(register: Callable[[Callable[..., Any]], Any]) -> list[Callable[..., Any]]:
    """Returns the hooks that were added by ``register``, a method of a node, in order."""
    # torch gives access to the hooks of a node only through a new handle.
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    del hooks[handle.id]
    return list(hooks.values()) if hooks else []


def _nothing(*_: Any) -> None:
    """A hook without effect."""


# Hooks that a program put on the node that accumulates the gradient of a leaf. A backward pass in a
# context asks for gradients and runs no such node, so Weft must call these hooks. torch reveals a
# node's hooks only when another hook is registered, which takes longer than all other work for a
# leaf. So this is off by default. Hooks of tensors differ: torch's engine always calls them.

_calls_leaf_hooks = False


def enable_leaf_hooks(enabled: bool = True) -> None:
    """Sets whether passes that begin later call the hooks of accumulating nodes."""
    global _calls_leaf_hooks
    _calls_leaf_hooks = enabled


def has_leaf_hooks(node: Node) -> bool:
    """Returns whether to call hooks of ``node``, which accumulates the gradient of a leaf."""
    return _calls_leaf_hooks and bool(hooks_of(node.register_hook))


def with_leaf_hooks(sink: Sink, nodes_of_leaves: Callable[[], Mapping[int, Node]]) -> Sink:
    """Returns ``sink``, extended by calling the hooks of accumulating nodes if enabled.

    Args:
        sink: Takes the gradients of leaves.
        nodes_of_leaves: Returns known accumulating nodes, by the ``id`` of their leaf.
    """
    if not _calls_leaf_hooks:
        return sink

    def add_and_call(pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]) -> None:
        pairs = list(pairs)
        sink(pairs, borrowed)
        nodes = nodes_of_leaves()
        with torch.no_grad():
            for leaf, gradient in pairs:
                node = nodes.get(id(leaf)) or _accumulating(leaf)
                for hook in hooks_of(node.register_hook):
                    hook((), (gradient,))

    return add_and_call


class _Use(torch.autograd.Function):
    """Uses a tensor of any layout, without memory or work."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return torch.empty(0)


_use: Callable[[Tensor], Tensor] = _Use.apply


def _accumulating(leaf: Tensor) -> Node:
    """Returns the node that accumulates the gradient of a leaf, of any layout."""
    with torch.enable_grad():
        made = leaf.view_as(leaf) if leaf.layout is torch.strided else _use(leaf)
    assert made.grad_fn is not None
    node = made.grad_fn.next_functions[0][0]
    assert node is not None
    return node
