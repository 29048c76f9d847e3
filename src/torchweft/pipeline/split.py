"""The backward of a stage in two parts: to its inputs first, to its weights later.

The first part captures the gradients at the nodes where paths to weights alone branch off. The
second part runs each of these nodes once more, for its branches only, and goes on to the weights.
So each node's work is done once (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchweft.autograd.component import accumulate
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark


class _Fork(NamedTuple):
    """A node on the way to an input, from which branches lead to weights alone."""

    outputs: tuple[GradientEdge, ...]
    branches: tuple[GradientEdge, ...]


class WeightPart:
    """The second part of one backward; holds the graph until ``run``.

    Args:
        parameters: The weights whose gradients it computes.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._whole: tuple[list[Tensor], list[Tensor]] | None = None
        self._forks: list[tuple[_Fork, tuple[Tensor | None, ...]]] = []

    def keep_all(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Leaves the whole graph to the second part."""
        self._whole = roots, gradients

    def keep(self, fork: _Fork, gradients: tuple[Tensor | None, ...]) -> None:
        """Leaves the branches of one node to the second part."""
        self._forks.append((fork, gradients))

    def run(self) -> None:
        """Adds the gradients to ``grad`` of the weights, and releases the graph.

        The engine itself adds them: it runs the hooks of the weights, and gives each weight a
        gradient of its own, also where one tensor is the gradient of several.
        """
        whole, self._whole = self._whole, None
        forks, self._forks = self._forks, []
        if whole is not None:
            roots, gradients = whole
            accumulate(tuple(roots), tuple(gradients), self._parameters)
        edges: list[Any] = []
        arrived: list[Tensor] = []
        for fork, captured in forks:
            pairs = zip(fork.outputs, captured, strict=True)
            given = {edge: gradient for edge, gradient in pairs if gradient is not None}
            if not given:
                continue
            for edge, gradient in _run(fork, given):
                edges.append(edge)
                arrived.append(gradient)
        if edges:
            accumulate(tuple(edges), tuple(arrived), self._parameters)


class _HasRun(BaseException):
    """Ends a run after its first node."""


def _run(
    fork: _Fork, gradients: dict[GradientEdge, Tensor]
) -> Iterator[tuple[GradientEdge, Tensor]]:
    """Runs the node of a fork once; yields the gradients of its branches.

    The run ends before the branches: the engine would run the hooks at their beginning, which run
    when the branches do.
    """
    node = fork.outputs[0].node
    found: list[tuple[Tensor | None, ...]] = []
    marks: list[Mark | None] = []

    def take(after: tuple[Tensor | None, ...], _: Any) -> None:
        if device_streams.HAS_CUDA:
            marks.append(device_streams.mark())
        found.append(after)
        raise _HasRun

    handle = node.register_hook(take)
    try:
        torch.autograd.grad(
            tuple(gradients),
            fork.branches,
            tuple(gradients.values()),
            retain_graph=True,
            allow_unused=True,
        )
    except _HasRun:
        for mark in marks:
            device_streams.use(mark, found)
    finally:
        handle.remove()
    for after in found:
        for (child, number), gradient in zip(node.next_functions, after, strict=True):
            if child is not None and gradient is not None:
                edge = GradientEdge(child, number)
                if edge in fork.branches:
                    yield edge, gradient


def input_part(
    roots: list[Tensor],
    gradients: list[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor | None], WeightPart]:
    """Runs the first part of a backward.

    Args:
        roots: Outputs of a stage.
        gradients: The gradient of each.
        inputs: The stage's inputs, leaves that require grad.
        parameters: The stage's weights that require grad.

    Returns:
        The gradient of each input, None where it has none; and the second part.
    """
    rest = WeightPart(parameters)
    if not roots:
        return [None] * len(inputs), rest
    if not inputs:
        rest.keep_all(roots, gradients)
        return [], rest
    forks = _forks(roots, inputs) if parameters else []
    if forks is None:
        rest.keep_all(roots, gradients)
        forks = []
    ends: list[Any] = [*inputs, *(edge for fork in forks for edge in fork.outputs)]
    results = torch.autograd.grad(
        roots, ends, gradients, retain_graph=bool(parameters), allow_unused=True
    )
    position = len(inputs)
    for fork in forks:
        end = position + len(fork.outputs)
        rest.keep(fork, results[position:end])
        position = end
    return list(results[: len(inputs)]), rest


def _forks(roots: Sequence[Tensor], inputs: Iterable[Tensor]) -> list[_Fork] | None:
    """Returns the nodes at which the backward is cut; None if it cannot be cut.

    It cannot where two nodes have a branch in common, in whole or in part of it: the earlier one
    would run into the branch by way of the later one.
    """
    edges = [get_gradient_edge(root) for root in roots]
    ends = {get_gradient_edge(each).node for each in inputs}
    order = _post_order([edge.node for edge in edges])
    leads: set[Node] = set()
    arriving: dict[Node, set[int]] = {}
    for edge in edges:
        arriving.setdefault(edge.node, set()).add(edge.output_nr)
    for node in order:
        for child, number in node.next_functions:
            if child is not None:
                arriving.setdefault(child, set()).add(number)
        if node in ends or any(child in leads for child, _ in node.next_functions):
            leads.add(node)
    forks: list[_Fork] = []
    begun: set[Node] = set()
    for node in order:
        if node not in leads or node in ends:
            continue
        branches = {
            GradientEdge(child, number)
            for child, number in node.next_functions
            if child is not None and child not in leads
        }
        nodes = {edge.node for edge in branches}
        if nodes & begun:
            return None
        begun |= nodes
        if branches:
            outputs = tuple(GradientEdge(node, number) for number in sorted(arriving[node]))
            forks.append(_Fork(outputs, tuple(branches)))
    if any(edge.node not in leads for edge in edges):
        return None  # A whole root leads to weights alone.
    behind = [child for node in begun for child, _ in node.next_functions if child is not None]
    return None if begun.intersection(_post_order(behind)) else forks


def _post_order(starts: Iterable[Node]) -> list[Node]:
    """Returns all nodes of a graph, each after those that its ``next_functions`` lead to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
