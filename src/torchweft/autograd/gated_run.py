"""Runs components that wait for themselves in one call of torch's engine, with gates.

Such a component sent a message, and has to send gradients of a later one before it gets those of
the first. The call runs in the thread that works on the pass. Gradients of received messages leave
the run as soon as they are complete; a gate has the thread send them, and take messages, until its
own gradients have come. All components of this worker that wait for themselves run in one call,
since one may wait for what another answers.
"""

from __future__ import annotations

from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd import node_hooks
from torchweft.autograd.codec import PassMode
from torchweft.autograd.component import Answer, Component, pairs_of
from torchweft.autograd.contexts import ReceiveRecord
from torchweft.autograd.gates import Opening, Probe, put_last
from torchweft.autograd.gradients import UNDEFINED, Gradient, Sink
from torchweft.autograd.local_engine import run_from
from torchweft.autograd.walk import Leaf, targets_of


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
        self._thread = get_ident()
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
            probes.append(Probe(node, partial(self._take, node, receive, at)))
        return probes

    def _take(self, node: Node, receive: ReceiveRecord, at: int, gradient: Tensor | None) -> None:
        if get_ident() != self._thread:
            return  # Another pass runs the same graph.
        number = receive.message_id
        found = self._gradients.setdefault(number, [None] * len(receive.nodes))
        create_graph = self._mode.create_graph
        found[at] = (
            UNDEFINED if gradient is None else node_hooks.at_received(node, gradient, create_graph)
        )
        self._missing[number] -= 1
        if not self._missing[number]:
            self._answers.append((receive, self._gradients.pop(number)))
