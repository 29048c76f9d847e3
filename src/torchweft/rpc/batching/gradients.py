"""Keeps the graphs of the callers of a batch apart.

The obvious way, to stack the callers' tensors within one graph, fails. The pass of one caller would
reach the tensors of all others, and free the graph for them. So the function runs on a detached
stack, in a graph of its own. Each caller gets nodes that lead to its own arguments and to the
leaves behind the function. Their backward runs the batch's graph, which no pass frees. See
``docs/protocols/batching.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from torchweft.autograd.records import PLACEHOLDER
from torchweft.errors import AutogradError
from torchweft.rpc.batching.stacking import region


class Joined(NamedTuple):
    """The graph of a batch.

    Attributes:
        inputs: The stacked arguments that require grad.
        outputs: The tensors of the result that require grad.
        leaves: The other leaves behind the outputs, such as parameters.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    leaves: list[Tensor]


def graph_of(function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> Joined | None:
    """Returns the graph between stacked arguments and a result; None if there is none.

    Raises:
        AutogradError: The graph has nodes that callers cannot share.
    """
    tensors = {id(each): each for each in outputs if isinstance(each, Tensor)}
    ends = [each for each in tensors.values() if each.requires_grad]
    if not ends:
        return None
    starts = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    leaves = _leaves_behind(function, ends, starts)
    return Joined(starts, ends, leaves)


def _leaves_behind(function: str, ends: list[Tensor], starts: list[Tensor]) -> list[Tensor]:
    own = {id(each) for each in starts}
    seen: set[Node] = set()
    leaves: dict[int, Tensor] = {id(each): each for each in ends if each.is_leaf}
    todo: list[Node | None] = [each.grad_fn for each in ends]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        elif isinstance(node, PLACEHOLDER):
            raise AutogradError(
                f"the result of {function} depends on a tensor that another worker has computed "
                "and that is not among the arguments of its calls: callers of a batch cannot share "
                "it. Detach it, pass it as an argument, or call a function that is not batched",
                operation=function,
            )
        todo += [following for following, _ in node.next_functions]
    for leaf in leaves.values():
        if leaf._backward_hooks and id(leaf) not in own:
            raise AutogradError(
                f"a leaf of shape {list(leaf.shape)} behind the result of {function} has a hook, "
                "which would be called twice in a pass through a batched call: use "
                "register_post_accumulate_grad_hook, or call a function that is not batched",
                operation=function,
            )
    return [leaf for key, leaf in leaves.items() if key not in own]


def shared_outputs(graph: Joined) -> list[Tensor]:
    """Returns the outputs for calls without gradients of their own; none leads to the inputs."""
    apply: Any = _Shared.apply
    return list(apply(graph, *graph.leaves))


class _Shared(torch.autograd.Function):
    """Stands between the outputs and the leaves; can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, graph: Joined, *leaves: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        return tuple([each.detach() for each in graph.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph: Joined = ctx.graph
        return None, *_pulled_back(graph, graph.leaves, gradients, torch.is_grad_enabled())


class Own(NamedTuple):
    """What belongs to one call: its row, and its arguments that require grad.

    Attributes:
        row: Its place in the batch.
        tensors: These arguments.
        columns: For each of them, the stacked argument that it is part of.
    """

    row: int
    tensors: list[Tensor]
    columns: list[Tensor]


def own_outputs(function: str, graph: Joined, own: Own) -> list[Tensor]:
    """Returns the rows of a call, which lead to its own arguments and to the leaves."""
    apply: Any = _Own.apply
    return list(apply(function, graph, own, *own.tensors, *graph.leaves))


class _Own(torch.autograd.Function):
    """Stands between the rows of a call and its arguments."""

    @staticmethod
    def forward(ctx: Any, function: str, graph: Joined, own: Own, *_: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.graph = function, graph
        # The tensors themselves would keep their graphs, and so form a circle with this node.
        ctx.row, ctx.columns = own.row, own.columns
        ctx.shapes = [each.shape for each in own.tensors]
        return tuple([each.detach()[own.row].clone() for each in graph.outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise AutogradError(
                f"second derivatives (create_graph=True) through a batched call of {ctx.function} "
                "are not supported if its arguments require grad; call a function that is not "
                "batched",
                operation=ctx.function,
            )
        graph, row = ctx.graph, ctx.row
        wide = list(_widened(graph.outputs, gradients, row))
        found = _pulled_back(graph, [*ctx.columns, *graph.leaves], wide, False)
        own = len(ctx.columns)
        rows = [
            None if each is None else each[row][region(shape)]
            for each, shape in zip(found[:own], ctx.shapes, strict=True)
        ]
        return None, None, None, *rows, *found[own:]


def _widened(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], row: int
) -> Iterator[Tensor | None]:
    """Yields gradients of whole outputs for those of one row; all others are zero."""
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is None:
            yield None
        else:
            wide = torch.zeros_like(output)
            wide[row] = gradient
            yield wide


def _pulled_back(
    graph: Joined, targets: Sequence[Tensor], gradients: Sequence[Tensor | None], is_recorded: bool
) -> Sequence[Tensor | None]:
    """Returns the gradients of ``targets`` for gradients of the outputs; keeps the graph."""
    pairs = [pair for pair in zip(graph.outputs, gradients, strict=True) if pair[1] is not None]
    if not pairs or not targets:
        return [None] * len(targets)
    outputs, known = zip(*pairs, strict=True)
    return torch.autograd.grad(
        outputs, targets, known, retain_graph=True, create_graph=is_recorded, allow_unused=True
    )
