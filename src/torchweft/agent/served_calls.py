"""Cancels the calls of other workers, as the shell of ``torchweft.protocol.calls.CallServer``."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from torchweft.agent.peers import Peer
from torchweft.protocol.calls import AnsweredCall, CallServer, CancelNested, ServedCall
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_ints

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchweft.agent.agent import Agent

current_call: ContextVar[ServedCall | None] = ContextVar("weft_served_call", default=None)
"""The call that the running code serves. Tasks of asyncio have that of who started them."""


class Cancelling:
    """Ends what other workers have given up.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._server = CallServer()
        agent.on(Kind.CANCEL, self._on_message, inline=True)

    def end_creations(self, making: Iterable[AnsweredCall], peer: Peer) -> None:
        """Cancels what makes values for a lost worker, where nobody else refers to them."""
        self._act(self._server.creations_lost(making, peer))

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        self._act(self._server.cancel_received(peer, decode_ints(frame.control)))

    def peer_lost(self, peer: Peer) -> None:
        """Cancels the calls of a lost worker."""
        self._act(self._server.caller_lost(peer))

    def _act(self, actions: list[CancelNested]) -> None:
        if actions:
            self._agent.reactor.submit(self._cancel_nested)

    def _cancel_nested(self, _: object, __: object) -> None:
        parents = self._server.take_cancelled_parents()
        if parents:
            self._agent.calls.cancel_nested(parents)
