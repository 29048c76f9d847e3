"""Runs the graph behind live sends, as far as their gradients have arrived.

``run_alone`` is for the usual and fastest case, a send that shares no node with another send.
``Component`` runs the sends that share nodes. The rules and their proofs are in
``docs/protocols/autograd.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import ReceiveRecord
from torchweft.autograd.gradients import UNDEFINED, Gradient, Sink, sum_of
from torchweft.autograd.local_engine import gradients_at, run_node
from torchweft.autograd.walk import (
    End,
    Group,
    Leaf,
    Partition,
    Reached,
    Stop,
    has_hooks,
    receives_behind,
    targets_of,
)
from torchweft.errors import ProtocolError
from torchweft.protocol.backward import Progress
from torchweft.runtime import device_streams

Answer = tuple[ReceiveRecord, list[Gradient]]
"""The complete gradients of a received message."""


class Component:
    """Sends that share nodes or placeholders, and the graph that they reach.

    The worker learns only gradually which sends are live. Nothing of the component runs until
    all its sends are known to be live, or the pass has settled that the others are not.

    Args:
        reached: The sends, live or not, and the leaves and receives that they reach together.
        ends: Where the graph ends, by node.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
    """

    def __init__(
        self,
        reached: Reached,
        ends: Mapping[Node, End],
        sink: Sink,
        mode: PassMode,
    ) -> None:
        self._sends = sends = reached.sends
        self._ends = ends
        self._sink = sink
        self._mode = mode
        self.reached = reached
        """The sends, and the leaves and receives that they reach together."""
        self._place_of = {send.message_id: place for place, send in enumerate(sends)}
        self._all = (1 << len(sends)) - 1
        self._live = 0
        self._arrived = 0
        self._news: list[int] = []
        self._visited: set[Node] = set()
        self._live_receives: set[int] = set()
        self._pending: dict[Node, dict[int, Tensor]] = {}
        self._used_edges: list[GradientEdge] = []
        self._is_all_used = True
        self._is_some_undefined = False
        self._partition: Partition | None = None
        self._has_run = False

    @property
    def is_finished(self) -> bool:
        """Whether everything has run; valid after ``advance``."""
        return self._has_run

    def announce(self, message_id: int) -> None:
        """Notes that a send is live."""
        place = self._place_of[message_id]
        if not self._live >> place & 1:
            self._live |= 1 << place
            self._news.append(message_id)

    def arrive(self, message_id: int, gradients: Iterable[Gradient]) -> None:
        """Takes the gradients of one send, which is live.

        Raises:
            ProtocolError: If they came before, or the send was settled not to be live.
        """
        place = self._place_of[message_id]
        if self._arrived >> place & 1:
            raise not_due(message_id)
        self.announce(message_id)
        self._arrived |= 1 << place
        for edge, gradient in zip(self._sends[place].edges, gradients, strict=True):
            if gradient is None:
                self._is_all_used = False
            else:
                self._used_edges.append(edge)
                self._keep(edge.node, edge.output_nr, None if gradient is UNDEFINED else gradient)

    def _keep(self, node: Node, output_nr: int, gradient: Tensor | None) -> None:
        """Adds to the gradients pending at a node; None only marks the node as one to run."""
        if node in self.reached.cuts:
            if gradient is not None:
                self._sink([((node, output_nr), gradient)], [gradient])  # type: ignore[list-item]
            return
        at_node = self._pending.setdefault(node, {})
        if gradient is None:
            self._is_some_undefined = True
            return
        earlier = at_node.get(output_nr)
        if device_streams.HAS_CUDA:
            device_streams.keep(earlier)
        at_node[output_nr] = gradient if earlier is None else sum_of(earlier, gradient)

    def advance(self, is_settled: bool, progress: Progress) -> list[Answer]:
        """Runs the ready nodes, if that answers a message or finishes the component.

        Args:
            is_settled: Whether all live sends have been announced.
            progress: Receives the progress of messages that results, except the answers.
        """
        if self._has_run:
            return []
        progress.walked += self._news
        newly_reached = self._newly_reached()
        if is_settled:
            self._arrived |= self._all & ~self._live
        answers = self._run_ready() if is_settled or self._live == self._all else []
        if self._arrived == self._all:
            self._has_run = True
            progress.executed += self._live_sends()
        answered = [receive.message_id for receive, _ in answers]
        progress.reached += [number for number in newly_reached if number not in answered]
        return answers

    def _live_sends(self) -> list[int]:
        return [number for number, place in self._place_of.items() if self._live >> place & 1]

    def _newly_reached(self) -> set[int]:
        """Returns the receives that the latest live sends are the first to reach."""
        news, self._news = self._news, []
        if not news or not self.reached.receives:
            return set()
        if self._live == self._all:
            found = self.reached.receives
        else:
            edges = [edge for number in news for edge in self._sends[self._place_of[number]].edges]
            found = receives_behind(edges, self._ends, self._visited)
        fresh = {record.message_id for record in found.values()} - self._live_receives
        self._live_receives |= fresh
        return fresh

    def _run_ready(self) -> list[Answer]:
        is_in_pieces = self._partition is not None or self._is_some_undefined
        if self._arrived == self._all and not is_in_pieces and not self.reached.cuts:
            return self._run(self._whole())
        if not self.reached.receives and self._arrived != self._all:
            return []
        if self._partition is None:
            self._partition = self._partitioned()
        return self._advance_partition(self._partition)

    def _whole(self) -> Group:
        return Group(self._all, self.reached.leaves, self._answerable(self.reached.receives))

    def _answerable(self, receives: Mapping[Node, ReceiveRecord]) -> dict[Node, ReceiveRecord]:
        """Omits receives that no live send reaches: their senders await no answer."""
        live = self._live_receives
        return {node: record for node, record in receives.items() if record.message_id in live}

    def _partitioned(self) -> Partition:
        seeds = [(1 << place, send.edges) for place, send in enumerate(self._sends)]
        return Partition(seeds, self._ends, self.reached.leaves)

    def _advance_partition(self, partition: Partition) -> list[Answer]:
        answers_any = any(
            group.receives and not group.signature & ~self._arrived for group in partition.groups
        )
        if not answers_any and self._arrived != self._all:
            return []
        groups = partition.take_ready(self._arrived)
        ready = Group(self._arrived)
        for group in groups:
            ready.leaves.update(group.leaves)
            ready.receives.update(self._answerable(group.receives))
        if partition.groups or self.reached.cuts:
            for node in partition.before_cut(groups, self._arrived, self.reached.cuts):
                self._run_alone(node)
        if self._is_some_undefined:
            self._run_undefined(partition.in_order(groups))
        return self._run(ready)

    def _run_undefined(self, nodes: Iterable[Node]) -> None:
        """Runs the ready nodes that the engine would not reach, since no gradient leads to them.

        Args:
            nodes: The ready nodes, in topological order.
        """
        by_engine: set[Node | None] = set()
        for node in nodes:
            gradients = self._pending.get(node)
            if gradients or node in by_engine:
                by_engine.update([target for target, _ in node.next_functions])
            elif gradients is not None:
                self._run_alone(node)

    def _run_alone(self, node: Node) -> None:
        gradients = self._pending.pop(node, None)
        if gradients is None:
            return
        passed = [place for place in self.reached.passed if place[0] == node]
        if passed:  # Before the node's hooks, as in the engine.
            pairs = pairs_of(passed, [gradients.get(output_nr) for _, output_nr in passed])
            self._sink(pairs, [gradient for _, gradient in pairs])
        if device_streams.HAS_CUDA:
            device_streams.keep(gradients)
        results = run_node(node, gradients, self._mode.create_graph)
        for (target, target_nr), gradient in zip(node.next_functions, results, strict=True):
            if target is not None:
                self._keep(target, target_nr, gradient)

    def _is_ready(self, node: Node) -> bool:
        return self._partition is None or not self._partition.signature_of(node) & ~self._arrived

    def _run(self, ready: Group) -> list[Answer]:
        """Runs the nodes of a group, which must lead only to ready nodes."""
        roots = self._take_roots()
        for edge, _ in roots:
            if edge.node in self.reached.leaves:  # A parameter that was itself sent.
                ready.leaves[edge.node] = self.reached.leaves[edge.node]
        targets, variables = targets_of(ready.leaves, ready.receives, self.reached.passed)
        captured = self._grad(roots, targets)
        for_leaves, for_messages = captured[: len(variables)], captured[len(variables) :]
        borrowed = [gradient for _, gradient in roots]
        borrowed += [gradient for gradient in for_messages if gradient is not None]
        self._sink(pairs_of(variables, for_leaves), borrowed)
        answers, without = answers_of(ready.receives, for_messages)
        if without:
            mark_used(answers, without, ready.receives, self._used())
        return list(answers.values())

    def _used(self) -> Collection[Node]:
        """Returns the placeholders that gradients lead to, including undefined gradients."""
        if self._is_all_used and self._arrived == self._all == self._live:
            return self.reached.receives
        return receives_behind(self._used_edges, self._ends, set())

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
        edges, gradients = zip(*roots, strict=True)
        if device_streams.HAS_CUDA:  # Another thread may have received some.
            device_streams.keep(gradients)
        retain, create = self._mode.retain_graph, self._mode.create_graph
        return gradients_at(targets, edges, gradients, retain_graph=retain, create_graph=create)


def pairs_of(
    variables: Iterable[Any], gradients: Iterable[Tensor | None]
) -> list[tuple[Any, Tensor]]:
    """Returns the leaves that have a gradient, with it."""
    return [
        (variable, gradient)
        for variable, gradient in zip(variables, gradients, strict=True)
        if gradient is not None
    ]


def answers_of(
    receives: Mapping[Node, ReceiveRecord], gradients: Iterable[Tensor | None]
) -> tuple[dict[int, Answer], list[Node]]:
    """Returns the gradients of messages by their numbers, and the placeholders without a gradient.

    Args:
        receives: The messages by their placeholders.
        gradients: The gradient at each placeholder, if any.
    """
    answers: dict[int, Answer] = {}
    without: list[Node] = []
    for (node, receive), gradient in zip(receives.items(), gradients, strict=True):
        if gradient is None:
            without.append(node)
        if len(receive.nodes) == 1:
            answers[receive.message_id] = (receive, [gradient])
            continue
        answer = answers.get(receive.message_id)
        if answer is None:
            answer = answers[receive.message_id] = (receive, [None] * len(receive.nodes))
        answer[1][receive.nodes.index(node)] = gradient
    return answers, without


def mark_used(
    answers: Mapping[int, Answer],
    without: Iterable[Node],
    receives: Mapping[Node, ReceiveRecord],
    used: Container[Node],
) -> None:
    """Marks the gradients of tensors that were used as undefined, where there is none."""
    for node in without:
        if node in used:
            receive = receives[node]
            _, gradients = answers[receive.message_id]
            gradients[receive.nodes.index(node)] = UNDEFINED


def not_due(message_id: int) -> ProtocolError:
    """Returns the error for gradients that came before."""
    return ProtocolError(f"gradients of message {message_id} came without being due")


def run_alone(
    reached: Reached,
    gradients: Sequence[Gradient],
    ends: Mapping[Node, End],
    sink: Sink,
    mode: PassMode,
) -> Collection[Answer]:
    """Runs the graph behind a send that shares no node with another send.

    Its nodes wait for nothing but its gradients. So one engine call does, or none at all where the
    sent tensors are leaves.

    Args:
        reached: The send, and the leaves and receives that it reaches.
        gradients: The gradients of the send.
        ends: Where the graph ends, by node.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
    """
    (send,), leaves, receives, passed, _ = reached
    edges = send.edges
    given = tuple([gradient for gradient in gradients if isinstance(gradient, Tensor)])
    is_whole = len(given) == len(edges)
    if not is_whole:
        if any(gradient is UNDEFINED for gradient in gradients):
            # The engine does not start at nodes without a gradient.
            whole = Component(reached, ends, sink, mode)
            whole.arrive(send.message_id, gradients)
            return whole.advance(True, Progress())
        both = zip(edges, gradients, strict=True)
        edges = tuple([edge for edge, gradient in both if gradient is not None])
    if not receives and len(leaves) <= len(edges) <= _FEW_LEAVES:
        pairs = _pairs_at_leaves(leaves, edges, given)
        if pairs is not None:
            sink(pairs, given)
            return ()
    targets, variables = targets_of(leaves, receives, passed)
    captured: Sequence[Tensor | None] = [None] * len(targets)
    if given and targets:
        retain, create = mode.retain_graph, mode.create_graph
        captured = gradients_at(targets, edges, given, retain_graph=retain, create_graph=create)
    if variables:
        for_leaves, captured = captured[: len(variables)], captured[len(variables) :]
        borrowed = [*given, *[gradient for gradient in captured if gradient is not None]]
        sink(pairs_of(variables, for_leaves), borrowed)
    if not receives:
        return ()
    answers, without = answers_of(receives, captured)
    if without:
        used = receives if is_whole else receives_behind(edges, ends, set())
        mark_used(answers, without, receives, used)
    return answers.values()


_FEW_LEAVES = 8
"""Up to so many sent leaves, a call of the engine takes longer than to look at each of them."""


def _pairs_at_leaves(
    leaves: Mapping[Node, Leaf], edges: Iterable[GradientEdge], gradients: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]] | None:
    """Returns the leaves at ``edges``; None if the engine has to convert or run something."""
    pairs = []
    for edge, gradient in zip(edges, gradients, strict=True):
        leaf = leaves.get(edge.node)
        if type(leaf) is Stop or leaf is None or has_hooks(leaf, edge.node):
            return None
        if leaf.dtype != gradient.dtype or leaf.shape != gradient.shape:
            return None
        pairs.append((leaf, gradient))
    return pairs
