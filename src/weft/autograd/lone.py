"""A send that shares no node with another one: the usual case, and the quick one.

Whether it is live shows when its gradients come, and they are all that its nodes wait for. So it
takes one walk and one engine call. Sends that share nodes are in ``component.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from weft.autograd.component import Answer, Live, answers_of, pairs_of
from weft.autograd.gradients import Sink
from weft.autograd.local_engine import gradients_at
from weft.autograd.modes import PassMode
from weft.autograd.walk import Reached, targets_of
from weft.errors import ProtocolError
from weft.protocol.backward import Progress


class LoneSend:
    """A send, and all that it reaches.

    Args:
        send: The send.
        reached: What it reaches.
        sink: Takes the gradients of leaves.
        mode: How the pass is run.
    """

    __slots__ = ("_gradients", "_is_live", "_mode", "_reached", "_send", "_sink", "is_finished")

    def __init__(self, send: Live, reached: Reached, sink: Sink, mode: PassMode) -> None:
        self.is_finished = False
        self._send = send
        self._reached = reached
        self._sink = sink
        self._mode = mode
        self._is_live = False
        self._gradients: Sequence[Tensor | None] | None = None

    def announce(self, _: int) -> None:
        """Notes that the send is live; this shows in what ``advance`` is asked next."""

    def arrive(self, message_id: int, gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients.

        Raises:
            ProtocolError: There have been some before.
        """
        if self._gradients is not None or self.is_finished:
            raise ProtocolError(f"gradients of message {message_id} came without being due")
        self._gradients = gradients

    def advance(self, _: bool, progress: Progress) -> list[Answer]:
        """Runs if there are gradients; see ``Component.advance``."""
        if self.is_finished:
            return []
        message_id, gradients = self._send.message_id, self._gradients
        answerable = [receive.message_id for receive in self._reached.receives]
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

    def _run(self, gradients: Sequence[Tensor | None]) -> list[Answer]:
        leaves, receives = self._reached.leaves, self._reached.receives
        targets, variables = targets_of(leaves, self._reached.passed)
        for receive in receives:
            targets += [GradientEdge(receive.node, nr) for nr in range(len(receive.metas))]
        edges = self._send.edges
        given = tuple([gradient for gradient in gradients if gradient is not None])
        if not given or not targets:
            return answers_of(receives, [None] * len(targets))
        if len(given) < len(edges):
            both = zip(edges, gradients, strict=True)
            edges = tuple([edge for edge, gradient in both if gradient is not None])
        retain, create = self._mode.retain_graph, self._mode.create_graph
        captured = gradients_at(targets, edges, given, retain_graph=retain, create_graph=create)
        for_messages = captured[len(variables) :]
        if variables:
            borrowed = [*given, *[gradient for gradient in for_messages if gradient is not None]]
            self._sink(pairs_of(variables, captured[: len(variables)]), borrowed)
        return answers_of(receives, for_messages)
