"""Runs one node of a graph, and nothing behind it.

The engine stops at a node only if nothing that is asked for lies behind it; weights that are used
in every step of a loop always do. So where a graph is cut, the nodes before the cut are run one
by one. The engine runs each of them, with all that it does for a node: tensor hooks on the
complete gradient, the hooks of the node, zeros in place of missing gradients where the node wants
them, and results brought into the shape and type of what they are gradients of. The last hook
of the node takes the results and ends the run.
"""

from __future__ import annotations

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

    def take(after: Gradients, _: Gradients) -> None:
        if _is_run_of(results):
            results.append(after)
            raise _HasRun

    handles = [node.register_hook(take)]
    if not gradients:
        handles.append(_without_gradients(node, results))
        gradients = {0: _zeros(node)}
    before = _running()
    try:
        torch._C._stash_obj_in_tls(_RUN, results)
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
        torch._C._stash_obj_in_tls(_RUN, before)
        for handle in handles:
            handle.remove()
    raise AssertionError(f"the engine did not run {node.name()}")


def _zeros(node: Any) -> Tensor:
    meta = node._input_metadata[0]
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


_RUN = "torchweft run of a node"
"""Under which the state of a thread has the results of the node that runs."""


def _running() -> Any:
    return torch._C._get_obj_in_tls(_RUN) if torch._C._is_key_in_tls(_RUN) else None


def _is_run_of(results: list[Gradients]) -> bool:
    return _running() is results


def _without_gradients(node: Node, results: list[Gradients]) -> Any:
    """Takes the gradient away with which the engine has to start; hooks of the node see none."""

    def take_away(incoming: tuple[Any, ...]) -> tuple[None, ...] | None:
        return (None,) * len(incoming) if _is_run_of(results) else None

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
