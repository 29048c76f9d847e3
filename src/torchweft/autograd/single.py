"""Runs one node of a graph, and nothing behind it.

The engine stops at a node only if nothing that is asked for lies behind it; weights that are used
in every step of a loop always do. So where a graph is cut, the nodes before the cut are run one
by one. The engine runs each of them, with all that it does for a node: tensor hooks on the
complete gradient, the hooks of the node, zeros in place of missing gradients where the node wants
them, and results brought into the shape and type of what they are gradients of. The last hook
of the node takes the results and ends the run.

Several threads may run the same node of a retained graph at a time, and each meets the hooks of the
others. On the CPU a node runs in the thread that asked for it, by which a hook knows its own run.
On other devices it runs in a thread of the engine; there, one run of a node waits for another.
"""

from __future__ import annotations

import contextlib
import threading
from _thread import get_ident
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.local_engine import gradients_at

Gradients = tuple[Tensor | None, ...]


class _HasRun(BaseException):
    """Ends a run behind the node that was to run; no code of the user sees it."""


def run_node(node: Node, gradients: Mapping[int, Tensor], create_graph: bool = False) -> Gradients:
    """Runs ``node``, once and for all.

    Args:
        node: A node that is no leaf.
        gradients: What has come for its outputs, by output number; none where all that led to it
            has run and left no gradient.
        create_graph: Whether the run itself is recorded.

    Returns:
        A gradient for each of its ``next_functions``, None where there is none.
    """
    behind = [GradientEdge(target, nr) for target, nr in node.next_functions if target is not None]
    if not behind:
        return (None,) * len(node.next_functions)
    results: list[Gradients] = []
    caller = get_ident()
    is_on_cpu = _meta_of(node).device.type == "cpu"

    def is_own_run() -> bool:
        return not is_on_cpu or get_ident() == caller

    def take(after: Gradients, _: Gradients) -> None:
        if is_own_run():
            results.append(after)
            raise _HasRun

    with contextlib.nullcontext() if is_on_cpu else _one_elsewhere:
        handles = [node.register_hook(take)]
        if not gradients:
            handles.append(_without_gradients(node, is_own_run))
            gradients = {0: _zeros(node)}
        try:
            gradients_at(
                behind,  # Of a node with several results, the engine makes those that are wanted.
                tuple([GradientEdge(node, output_nr) for output_nr in gradients]),
                tuple(gradients.values()),
                retain_graph=True,
                create_graph=create_graph,
            )
        except _HasRun:
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
    """Takes the gradient away with which the engine has to start; hooks of the node see none."""

    def take_away(incoming: tuple[Any, ...]) -> tuple[None, ...] | None:
        return (None,) * len(incoming) if is_own_run() else None

    handle = node.register_prehook(take_away)
    hooks: Any = handle.hooks_dict_ref()
    hooks.move_to_end(handle.id, last=False)
    return handle


def hooks_of(register: Callable[[Callable[..., Any]], Any]) -> list[Callable[..., Any]]:
    """Returns the hooks that ``register``, a method of a node, has put there, in their order."""
    # The only way to the hooks of a node leads through a new one.
    handle = register(_nothing)
    try:
        hooks = handle.hooks_dict_ref()
        return [hook for number, hook in hooks.items() if number != handle.id]
    finally:
        handle.remove()


def _nothing(*_: Any) -> None:
    """Is a hook without effect."""
