"""Cancels calls of other workers: the shell of ``torchweft.protocol.served_calls.CallServer``."""

from __future__ import annotations

from contextvars import ContextVar

from torchweft.agent.open_calls import OpenCalls
from torchweft.agent.peers import Peer
from torchweft.agent.receiving import Receiver
from torchweft.protocol.served_calls import (
    AnsweredCall,
    CallServer,
    CancelNested,
    ServedCall,
)
from torchweft.runtime.reactor import Reactor
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind, decode_ints

current_call: ContextVar[ServedCall | None] = ContextVar("weft_served_call", default=None)
"""The call that the running code serves. An asyncio task inherits it from its creator."""


class Cancelling:
    """Ends the calls that other workers have given up.

    Args:
        reactor: Provides the threads that cancel.
        calls: The calls that this worker has open, some of them nested in calls that it serves.
        receiver: Delivers the messages that cancel calls.
    """

    def __init__(self, reactor: Reactor, calls: OpenCalls, receiver: Receiver) -> None:
        self._reactor = reactor
        self._calls = calls
        self._server = CallServer()
        receiver.on(Kind.CANCEL, self._on_message, inline=True)

    def end_creations(self, making: set[AnsweredCall], peer: Peer) -> None:
        """Cancels calls that make values for a lost worker, unless others refer to the values.

        The owner of the values must have been told of the loss.
        """
        self._act(self._server.creations_lost(making.copy(), peer))

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        self._act(self._server.cancel_received(peer, decode_ints(frame.control)))

    def peer_lost(self, peer: Peer) -> None:
        """Cancels the calls of a lost worker."""
        self._act(self._server.caller_lost(peer))

    def _act(self, actions: list[CancelNested]) -> None:
        if actions:
            self._reactor.submit(self._cancel_nested)

    def _cancel_nested(self, _: object, __: object) -> None:
        parents = self._server.take_cancelled_parents()
        if parents:
            self._calls.cancel_nested(parents)
