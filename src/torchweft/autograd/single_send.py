"""A send that shares no node with another send: the usual and fastest case.

The arrival of its gradients shows that it is live, and its nodes wait for nothing else. So it
takes one walk and one engine call. Sends that share nodes are in ``component.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchweft.autograd.component import Answer, Component, Live, answers_of, pairs_of
from torchweft.autograd.gradients import UNDEFINED, Gradient, Sink
from torchweft.autograd.local_engine import gradients_at
from torchweft.autograd.modes import PassMode
from torchweft.autograd.walk import End, Reached, receives_behind, targets_of
from torchweft.errors import ProtocolError
from torchweft.protocol.backward import Progress


class SingleSend:
    """A send, and the graph that it reaches.

    Args:
        send: The send.
        reached: The leaves and receives that it reaches.
        ends: Where the graph ends, by node.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
    """

    __slots__ = (
        "_ends", "_gradients", "_is_live", "_mode", "_reached", "_send", "_sink", "is_finished",
    )  # fmt: skip

    def __init__(
        self, send: Live, reached: Reached, ends: Mapping[Node, End], sink: Sink, mode: PassMode
    ) -> None:
        self.is_finished = False
        self._send = send
        self._reached = reached
        self._ends = ends
        self._sink = sink
        self._mode = mode
        self._is_live = False
        self._gradients: Sequence[Gradient] | None = None

    def announce(self, _: int) -> None:
        """Does nothing: the next ``advance`` treats the send as live."""

    def arrive(self, message_id: int, gradients: Sequence[Gradient]) -> None:
        """Takes the gradients.

        Raises:
            ProtocolError: They came before.
        """
        if self._gradients is not None or self.is_finished:
            raise ProtocolError(f"gradients of message {message_id} came without being due")
        self._gradients = gradients

    def advance(self, _: bool, progress: Progress) -> list[Answer]:
        """Runs the graph if the gradients have come; see ``Component.advance``."""
        if self.is_finished:
            return []
        message_id, gradients = self._send.message_id, self._gradients
        answerable = self._reached.message_ids()
        if not self._is_live:
            self._is_live = True
            progress.walked.append(message_id)
            if gradients is None:
                progress.reached += answerable
        if gradients is None:
            return []
        answers = self._run(gradients)
        self._gradients = None
        self.is_finished = True
        progress.executed.append(message_id)
        progress.answered += answerable
        return answers

    def _run(self, gradients: Sequence[Gradient]) -> list[Answer]:
        leaves, receives = self._reached.leaves, self._reached.receives
        targets, variables = targets_of(leaves, self._reached.passed)
        targets += [GradientEdge(node, 0) for node in receives]
        edges = self._send.edges
        given = tuple([gradient for gradient in gradients if isinstance(gradient, Tensor)])
        if len(given) < len(edges):
            if any(gradient is UNDEFINED for gradient in gradients):
                return self._run_in_pieces(gradients)
            both = zip(edges, gradients, strict=True)
            edges = tuple([edge for edge, gradient in both if gradient is not None])

        def used() -> Collection[Node]:
            is_whole = len(edges) == len(self._send.edges)
            return receives if is_whole else receives_behind(edges, self._ends, set())

        if not given or not targets:
            return answers_of(receives, [None] * len(receives), used)
        retain, create = self._mode.retain_graph, self._mode.create_graph
        captured = gradients_at(targets, edges, given, retain_graph=retain, create_graph=create)
        for_messages = captured[len(variables) :]
        if variables:
            borrowed = [*given, *[gradient for gradient in for_messages if gradient is not None]]
            self._sink(pairs_of(variables, captured[: len(variables)]), borrowed)
        return answers_of(receives, for_messages, used)

    def _run_in_pieces(self, gradients: Sequence[Gradient]) -> list[Answer]:
        """Also runs nodes without a gradient, at which the engine does not start."""
        whole = Component([self._send], self._reached, self._ends, self._sink, self._mode)
        whole.arrive(self._send.message_id, gradients)
        return whole.advance(True, Progress())
