"""Runs the graph behind live sends, once their gradients have arrived.

``run_alone`` is for the usual and fastest case, a send that shares no node with another send.
``Component`` runs sends that share nodes, when all their gradients are there. ``GatedRun`` runs
components that wait for themselves. The rules and their proofs are in
``docs/protocols/autograd.md``.

A component *waits for itself* if it sent a message, and has to send gradients of a later one before
it gets those of the first. It runs in one call of torch's engine, with gates, in the thread that
works on the pass. Gradients of received messages leave the run as soon as they are complete; a gate
has the thread send them, and take messages, until its own gradients have come. All such components
of this worker run in one call, since one may wait for what another answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd import hooks
from torchweft.autograd.codec import PassMode
from torchweft.autograd.gradients import UNDEFINED, Gradient, Sink
from torchweft.autograd.local_engine import (
    Opening,
    Probe,
    gradients_at,
    probed_by,
    put_last,
    run_from,
)
from torchweft.autograd.records import ReceiveRecord
from torchweft.autograd.walk import (
    Answer,
    End,
    Leaf,
    Reached,
    Stop,
    answers_of,
    has_hooks,
    mark_used,
    note_reached,
    pairs_of,
    receives_behind,
    targets_of,
)
from torchweft.errors import ProtocolError
from torchweft.protocol.backward import Progress
from torchweft.threads import device_streams


class Component:
    """Sends that share nodes or placeholders, and the graph that they reach.

    The worker learns only gradually which sends are live, and which of their tensors. Nothing of
    the component runs until all its sends are known to be live, or the pass has settled that the
    others are not.

    Args:
        reached: The sends, live or not, and the leaves and receives that they reach together.
        ends: Where the graph ends, by node.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
        answers_all: Whether each tensor of a message gets a gradient, also an unused one.
    """

    def __init__(
        self,
        reached: Reached,
        ends: Mapping[Node, End],
        sink: Sink,
        mode: PassMode,
        answers_all: bool = False,
    ) -> None:
        self.reached = reached
        """The sends, and the leaves and receives that they reach together."""
        self.mode = mode
        self._sends = sends = reached.sends
        self._ends = ends
        self._sink = sink
        self._answers_all = answers_all
        self._place_of = {send.message_id: place for place, send in enumerate(sends)}
        self._whole = [(1 << len(send.edges)) - 1 for send in sends]
        self._live: dict[int, int] = {}
        """By place, the live tensors of each live send, as bits."""
        self._given: dict[int, list[Gradient]] = {}
        self._marks: dict[int, Any] = {}
        self._news: list[tuple[int, int]] = []
        self._noted_in_part: set[int] = set()
        self._visited: set[Node] = set()
        self.live_receives: dict[Node, ReceiveRecord] = {}
        """Received messages by the placeholders that live tensors reach; valid after ``note``."""
        self.is_finished = False
        """Whether everything has run."""
        self.is_in_gates = False
        """Whether a ``GatedRun`` runs it."""

    def announce(self, message_id: int, tensors: int | None = None) -> None:
        """Notes that a send is live.

        Args:
            message_id: The send.
            tensors: Its live tensors, as bits; by default all of them.

        Raises:
            ProtocolError: If it has fewer tensors.
        """
        place = self._place_of[message_id]
        whole = self._whole[place]
        if tensors is None:
            tensors = whole
        elif tensors & ~whole:
            raise ProtocolError(f"message {message_id} has fewer tensors than were announced")
        elif place not in self._live:
            self._noted_in_part.add(place)
        self._announce(place, tensors)

    def _announce(self, place: int, tensors: int) -> None:
        earlier = self._live.get(place)
        if earlier is None or tensors & ~earlier:
            self._live[place] = tensors | (earlier or 0)
            self._news.append((place, tensors & ~(earlier or 0)))

    def arrive(self, message_id: int, gradients: Iterable[Gradient]) -> None:
        """Takes the gradients of one send, which is live.

        Raises:
            ProtocolError: If they came before.
        """
        place = self._place_of[message_id]
        if place in self._given:
            raise not_due(message_id)
        given = self._given[place] = list(gradients)
        if device_streams.HAS_CUDA:
            self._marks[place] = device_streams.mark()
        bits = sum([1 << at for at, gradient in enumerate(given) if gradient is not None])
        if place in self._noted_in_part:
            self._news.append((place, 0))  # It is complete now.
        self._announce(place, bits)

    @property
    def has_arrivals(self) -> bool:
        """Whether gradients of some send have come."""
        return bool(self._given)

    @property
    def has_more_to_run(self) -> bool:
        """Whether gradients of some send have come, or are being awaited in a run."""
        return not self.is_finished and (self.is_in_gates or bool(self._given))

    def note(self, progress: Progress) -> dict[Node, ReceiveRecord]:
        """Notes the sends walked from since the last call; returns the placeholders they reach."""
        news, self._news = self._news, []
        if not news:
            return {}
        parts: dict[int, int] = {}
        for place, _ in news:
            number = self._sends[place].message_id
            progress.walked.append(number)
            if place in self._noted_in_part:
                is_complete = place in self._given
                parts[number] = self._whole[place] if is_complete else self._live[place]
        if parts:
            progress.add_parts(parts, {})
        found = self._newly_reached(news)
        self.live_receives.update(found)
        return found

    def _newly_reached(self, news: Sequence[tuple[int, int]]) -> dict[Node, ReceiveRecord]:
        receives = self.reached.receives
        if not receives:
            return {}
        if not self._visited and self._is_all_live():
            return receives
        edges = [
            edge
            for place, tensors in news
            for at, edge in enumerate(self._sends[place].edges)
            if tensors >> at & 1
        ]
        return receives_behind(edges, self._ends, self._visited)

    def _is_all_live(self) -> bool:
        live = self._live
        return len(live) == len(self._sends) and all(
            live[place] == whole for place, whole in enumerate(self._whole)
        )

    def advance(self, is_settled: bool, progress: Progress) -> list[Answer]:
        """Runs everything, once all gradients of live sends are there and it is known.

        Args:
            is_settled: Whether all live sends have been announced.
            progress: Receives the progress of messages that results, except the answers.
        """
        if self.is_finished:
            return []
        found = self.note(progress)
        if self.is_in_gates:
            return []
        answers: list[Answer] = []
        count = len(self._given)
        if count == len(self._sends) or (is_settled and count == len(self._live)):
            answers = self._run()
            self.finish(progress)
        self.note_reached(progress, found, answers)
        return answers

    def note_reached(
        self, progress: Progress, found: Mapping[Node, ReceiveRecord], answers: Iterable[Answer]
    ) -> None:
        """Notes the messages that have been reached, unless ``answers`` has their gradients."""
        if found:
            answered = {receive.message_id for receive, _ in answers}
            note_reached(progress, found, answered, self._answers_all)

    def finish(self, progress: Progress) -> None:
        """Notes that everything has run."""
        self.is_finished = True
        progress.executed += self.live_sends()

    def live_sends(self) -> list[int]:
        """Returns the numbers of the live sends that are known."""
        return [self._sends[place].message_id for place in sorted(self._live)]

    def waits_for_itself(self, place_of: Mapping[int, int]) -> bool:
        """Returns whether a missing gradient may depend on a message that this component answers.

        Args:
            place_of: The place of each message that was sent in the context, in their order.
        """
        latest = 0
        for receive in self.live_receives.values():
            if receive.is_outside:  # Nothing is known of its order.
                latest = len(place_of)
                break
            latest = max(latest, receive.sends_before)
        return any(
            place_of.get(self._sends[place].message_id, -1) < latest
            for place in self._live
            if place not in self._given
        )

    # Running

    def _run(self) -> list[Answer]:
        edges, gradients, openings = self.roots()
        # Received messages that no live send reaches are not awaited.
        live = {record.message_id for record in self.live_receives.values()}
        receives = {
            node: record
            for node, record in self.reached.receives.items()
            if record.message_id in live
        }
        targets, variables = targets_of(self.reached.leaves, receives, self.reached.passed)
        try:
            captured = run_from(
                targets,
                edges,
                gradients,
                openings,
                self.reached.cuts,
                retain_graph=self.mode.retain_graph,
                create_graph=self.mode.create_graph,
            )
        finally:
            for opening in openings:
                opening.close()
        for_leaves, for_messages = captured[: len(variables)], captured[len(variables) :]
        borrowed = [*gradients, *[each for each in for_messages if each is not None]]
        self._sink(pairs_of(variables, for_leaves), borrowed)
        answers, without = answers_of(receives, for_messages, self.mode.create_graph)
        if without:
            mark_used(answers, without, receives, self.live_receives)
        return list(answers.values())

    def roots(self) -> tuple[list[GradientEdge], list[Tensor], list[Opening]]:
        """Returns the edges of the gradients that are there, and these; gates for undefined ones.

        The engine cannot start at a node without a gradient.
        """
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        openings: list[Opening] = []
        for place, given in self._given.items():
            send = self._sends[place]
            if device_streams.HAS_CUDA:  # Another thread may have received some.
                device_streams.use(self._marks[place], given)
            for at, gradient in enumerate(given):
                if isinstance(gradient, Tensor):
                    edges.append(send.edges[at])
                    gradients.append(gradient)
                elif gradient is UNDEFINED:
                    openings.append(Opening(send.gates[at], _nothing))  # type: ignore[union-attr]
        return edges, gradients, openings

    def number_of(self, place: int) -> int:
        """Returns the number of the send at a place."""
        return self._sends[place].message_id

    def missing(self) -> list[int]:
        """Returns the places of the live sends whose gradients have not come."""
        return [place for place in self._live if place not in self._given]

    def gates_of(self, place: int) -> list[tuple[int, Node]]:
        """Returns the gates of the live tensors of a send, with their places in the message."""
        live, send = self._live[place], self._sends[place]
        return [(at, gate) for at, gate in enumerate(send.gates) if live >> at & 1]  # type: ignore[union-attr]

    def plain_leaf_at(self, place: int, at: int) -> Tensor | None:
        """Returns a tensor of a send if it is a leaf without hooks, which may have any layout."""
        node = self._sends[place].edges[at].node
        leaf = self.reached.leaves.get(node)
        return leaf if isinstance(leaf, Tensor) and not has_hooks(leaf, node) else None

    def take_gradient(self, place: int, at: int) -> Gradient:
        """Takes out the gradient of a tensor of a send; None if none of the send has come."""
        given = self._given.get(place)
        if given is None:
            return None
        gradient = given[at]
        if gradient is None:
            number = self._sends[place].message_id
            raise ProtocolError(
                f"no gradient came for tensor {at} of message {number}, which had been announced"
            )
        if device_streams.HAS_CUDA:
            device_streams.use(self._marks[place], given)
        given[at] = UNDEFINED  # Not kept until the end of the run.
        return gradient


def _nothing() -> None:
    """Returns an undefined gradient."""


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
    answers, without = answers_of(receives, captured, mode.create_graph)
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


# In gates


class PassEnded(BaseException):
    """Ends a run of torch's engine from within a gate; the pass is over on this worker.

    Args:
        error: Why the thread cannot wait any longer; None if the pass knows.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error


class GatedRun:
    """One run of components that wait for themselves, once all live sends are known.

    Args:
        components: The components.
        nodes: Their nodes.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
        wait: Sends ``take_answers``, and takes messages; blocks until there are some. Called again
            while the gradients of a send are missing, which it gets the number of.
    """

    def __init__(
        self,
        components: Sequence[Component],
        nodes: Iterable[Node],
        sink: Sink,
        mode: PassMode,
        wait: Callable[[int], None],
    ) -> None:
        self._components = components
        self._nodes = nodes
        self._sink = sink
        self._mode = mode
        self._wait = wait
        self._receives: dict[Node, ReceiveRecord] = {}
        self._missing: Counter[int] = Counter()
        self._gradients: dict[int, list[Gradient]] = {}
        self._answers: list[Answer] = []
        self._at_leaves: list[tuple[Component, int, int, int, Tensor]] = []

    def take_answers(self) -> list[Answer]:
        """Removes and returns the messages whose gradients have become complete."""
        answers, self._answers = self._answers, []
        return answers

    def run(self) -> list[Answer]:
        """Runs everything; returns the messages that have not been answered before."""
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        openings: list[Opening] = []
        probes: list[Probe] = []
        leaves: dict[Node, Leaf] = {}
        try:
            for component in self._components:
                some_edges, some_gradients, some_openings = component.roots()
                edges += some_edges
                gradients += some_gradients
                openings += some_openings
                leaves.update(component.reached.leaves)
                self._receives.update(component.live_receives)
            openings += self._gates()
            probes += self._probes()
            reached = self._components[0].reached
            targets, variables = targets_of(leaves, self._receives, reached.passed)
            with probed_by(self):
                captured = run_from(
                    targets,
                    edges,
                    gradients,
                    openings,
                    reached.cuts,
                    retain_graph=self._mode.retain_graph,
                    create_graph=self._mode.create_graph,
                )
        finally:
            for opening in openings:
                opening.close()
            for probe in probes:
                probe.close()
        for_leaves, for_messages = captured[: len(variables)], captured[len(variables) :]
        borrowed = [*gradients, *[each for each in for_messages if each is not None]]
        self._sink(pairs_of(variables, for_leaves), borrowed)
        self._add_at_leaves()
        return self.take_answers()

    def _add_at_leaves(self) -> None:
        """Takes the gradients of leaves that were themselves sent, which need no gate."""
        for component, number, place, at, leaf in self._at_leaves:
            gradient = self._gradient_of(component, number, place, at)
            if gradient is not None:
                self._sink([(leaf, gradient.to(leaf.dtype))], [gradient])

    def _gates(self) -> list[Opening]:
        """Returns the gates of the missing sends, and puts them in their order."""
        gates: list[tuple[int, Node]] = []
        openings: list[Opening] = []
        for component in self._components:
            for place in component.missing():
                number = component.number_of(place)
                for at, gate in component.gates_of(place):
                    leaf = component.plain_leaf_at(place, at)
                    if leaf is not None:
                        self._at_leaves.append((component, number, place, at, leaf))
                        continue
                    gates.append((number, gate))
                    take = partial(self._gradient_of, component, number, place, at)
                    openings.append(Opening(gate, take))
        put_last(gates, self._nodes)
        return openings

    def _gradient_of(self, component: Component, number: int, place: int, at: int) -> Tensor | None:
        while (gradient := component.take_gradient(place, at)) is None:
            self._wait(number)
        return gradient if isinstance(gradient, Tensor) else None

    def _probes(self) -> list[Probe]:
        """Returns the probes at received tensors, which notice when their gradients are there."""
        self._missing.update([receive.message_id for receive in self._receives.values()])
        probes: list[Probe] = []
        for node, receive in self._receives.items():
            at = 0 if len(receive.nodes) == 1 else receive.nodes.index(node)
            probes.append(Probe(node, partial(self._take, node, receive, at), self))
        return probes

    def _take(self, node: Node, receive: ReceiveRecord, at: int, gradient: Tensor | None) -> None:
        number = receive.message_id
        found = self._gradients.setdefault(number, [None] * len(receive.nodes))
        create_graph = self._mode.create_graph
        found[at] = (
            UNDEFINED if gradient is None else hooks.at_received(node, gradient, create_graph)
        )
        self._missing[number] -= 1
        if not self._missing[number]:
            self._answers.append((receive, self._gradients.pop(number)))
