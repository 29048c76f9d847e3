"""Runs the part of a graph that some live sends reach, as far as their gradients have arrived.

What the rules are and why they are right is in ``docs/protocols/autograd.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from weft.autograd.contexts import ReceiveRecord
from weft.autograd.gradients import sum_of
from weft.autograd.local_engine import gradients_at
from weft.autograd.single import run_node
from weft.autograd.walk import Group, Partition, Reached


class Live(NamedTuple):
    """A live send: where in the graph its gradients go; ``message_id`` is 0 for the roots."""

    message_id: int
    edges: tuple[GradientEdge, ...]


class Answer(NamedTuple):
    """The gradients of a received message, complete; None for tensors that have none."""

    receive: ReceiveRecord
    gradients: list[Tensor | None]


class Sink(Protocol):
    """Where the gradients of leaves go."""

    def __call__(
        self, pairs: Iterable[tuple[Tensor, Tensor]], borrowed: Iterable[Tensor]
    ) -> object:
        """Adds the gradients of one engine call; ``borrowed`` ones are used elsewhere too."""
        ...


class Component:
    """Sends that share nodes or placeholders, and all that they reach.

    Args:
        sends: The live sends of the component.
        reached: What they reach together.
        receive_of: Receives by placeholder node.
        sink: Takes the gradients of leaves.
        retain_graph: Whether another pass may follow.
    """

    def __init__(
        self,
        sends: Sequence[Live],
        reached: Reached,
        receive_of: Mapping[Node, ReceiveRecord],
        sink: Sink,
        retain_graph: bool,
    ) -> None:
        self._sends = sends
        self._reached = reached
        self._receive_of = receive_of
        self._sink = sink
        self._retain_graph = retain_graph
        self._bit_of = {send.message_id: 1 << place for place, send in enumerate(sends)}
        self._all = (1 << len(sends)) - 1
        self._arrived = 0
        self._pending: dict[Node, dict[int, Tensor]] = {}
        self._partition: Partition | None = None

    @property
    def is_finished(self) -> bool:
        """Whether everything has run; ask after ``advance``."""
        return self._arrived == self._all

    def arrive(self, send: Live, gradients: Iterable[Tensor | None]) -> None:
        """Takes the gradients of one send."""
        self._arrived |= self._bit_of[send.message_id]
        for edge, gradient in zip(send.edges, gradients, strict=True):
            if gradient is not None:
                self._keep(edge.node, edge.output_nr, gradient)

    def _keep(self, node: Node, output_nr: int, gradient: Tensor) -> None:
        at_node = self._pending.setdefault(node, {})
        earlier = at_node.get(output_nr)
        at_node[output_nr] = gradient if earlier is None else sum_of(earlier, gradient)

    def advance(self) -> list[Answer]:
        """Runs what is ready, if that answers a message or ends the component."""
        if self.is_finished and self._partition is None:
            return self._run(self._whole())
        if not self._reached.receives:
            return []
        if self._partition is None:
            self._partition = self._partitioned()
        return self._advance_partition(self._partition)

    def _whole(self) -> Group:
        return Group(self._all, self._reached.leaves, self._reached.receives)

    def _partitioned(self) -> Partition:
        seeds = [(self._bit_of[send.message_id], send.edges) for send in self._sends]
        return Partition(seeds, self._receive_of, self._reached.leaves)

    def _advance_partition(self, partition: Partition) -> list[Answer]:
        answers_any = any(
            group.receives and not group.signature & ~self._arrived for group in partition.groups
        )
        if not answers_any and not self.is_finished:
            return []
        groups = partition.take_ready(self._arrived)
        ready = Group(self._arrived)
        for group in groups:
            ready.leaves.update(group.leaves)
            ready.receives.extend(group.receives)
        if partition.groups:
            for node in partition.before_cut(groups, self._arrived):
                self._run_alone(node)
        return self._run(ready)

    def _run_alone(self, node: Node) -> None:
        gradients = self._pending.pop(node, None)
        if gradients is None:
            return
        results = run_node(node, gradients)
        for (target, target_nr), gradient in zip(node.next_functions, results, strict=True):
            if target is not None and gradient is not None:
                self._keep(target, target_nr, gradient)

    def _is_ready(self, node: Node) -> bool:
        return self._partition is None or not self._partition.signature_of(node) & ~self._arrived

    def _run(self, ready: Group) -> list[Answer]:
        """Runs the nodes of a group; they must lead to no node that is not ready."""
        roots = self._take_roots()
        for edge, _ in roots:
            if edge.node in self._reached.leaves:  # A parameter that was sent as it is.
                ready.leaves[edge.node] = self._reached.leaves[edge.node]
        targets = [GradientEdge(node, 0) for node in ready.leaves]
        for receive in ready.receives:
            targets += [GradientEdge(receive.node, nr) for nr in range(len(receive.metas))]
        captured = self._grad(roots, targets)
        for_leaves, for_messages = captured[: len(ready.leaves)], captured[len(ready.leaves) :]
        borrowed = [gradient for _, gradient in roots]
        borrowed += [gradient for gradient in for_messages if gradient is not None]
        self._sink(_pairs(ready.leaves.values(), for_leaves), borrowed)
        return _answers(ready.receives, for_messages)

    def _take_roots(self) -> list[tuple[GradientEdge, Tensor]]:
        ready = [node for node in self._pending if self._is_ready(node)]
        return [
            (GradientEdge(node, output_nr), gradient)
            for node in ready
            for output_nr, gradient in self._pending.pop(node).items()
        ]

    def _grad(
        self, roots: Sequence[tuple[GradientEdge, Tensor]], targets: Sequence[GradientEdge]
    ) -> Sequence[Tensor | None]:
        if not roots or not targets:
            return [None] * len(targets)
        return gradients_at(targets, roots, retain_graph=self._retain_graph)


def _pairs(
    variables: Iterable[Tensor], gradients: Iterable[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    return [
        (variable, gradient)
        for variable, gradient in zip(variables, gradients, strict=True)
        if gradient is not None
    ]


def _answers(receives: Iterable[ReceiveRecord], gradients: Sequence[Tensor | None]) -> list[Answer]:
    answers, start = [], 0
    for receive in receives:
        end = start + len(receive.metas)
        answers.append(Answer(receive, list(gradients[start:end])))
        start = end
    return answers
