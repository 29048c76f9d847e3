"""Outgoing messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torchweft.agent.first_contacts import FirstContacts
from torchweft.agent.lifetime import Lifetime
from torchweft.agent.peers import Outgoing, Peer, Unsent
from torchweft.agent.receiving import Receiver
from torchweft.errors import NotInitialized, WorkerLost
from torchweft.transport.link import LinkClosed
from torchweft.wire.frames import Frame, encode_frame
from torchweft.wire.messages import Kind, encode_ints


class Sender:
    """Sends the messages of one worker. Thread-safe.

    Args:
        lifetime: Whether the worker still takes part.
        first_contacts: Keeps messages to peers to which there is no connection yet.
        receiver: Takes messages to this worker itself.
        lose: Declares a peer lost, with the cause.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        first_contacts: FirstContacts,
        receiver: Receiver,
        lose: Callable[[Peer, str], None],
    ) -> None:
        self._lifetime = lifetime
        self._first_contacts = first_contacts
        self._receiver = receiver
        self._lose = lose

    def send(self, peer: Peer, message: Outgoing, *, may_block: bool = True) -> None:
        """Sends one frame; if there is no connection yet, as soon as there is one.

        Args:
            peer: The receiver.
            message: The frame.
            may_block: Whether to wait until the socket has room. Must be False in a thread that
                keeps others from reading: the peer may be waiting in the same way.

        Raises:
            WorkerLost: The peer is lost. A later loss is reported by ``Agent.on_lost``.
            NotInitialized: This worker has shut down.
        """
        if isinstance(message, Frame):
            self._lifetime.check_open()
            self._receiver.deliver(peer, message)
            return
        link = peer.link
        if link is None or peer.unsent:
            if self._first_contacts.keep(peer, Unsent(message)):
                return
            link = peer.link
            assert link is not None
        try:
            link.send(message, may_block=may_block)
        except LinkClosed as error:
            self._lose(peer, str(error))
            raise self._lifetime.error_of(peer) from error

    def post(self, peer: Peer, message: Outgoing) -> None:
        """Sends one frame without ever blocking; for inline handlers and jobs of the timers.

        Raises nothing if the peer is lost: threads that wait for the peer are told otherwise.
        """
        link = peer.link
        if peer.lost is not None or self._lifetime.is_closed:
            return
        if isinstance(message, Frame):
            self._receiver.deliver(peer, message)
            return
        if link is None or peer.unsent:
            with contextlib.suppress(WorkerLost, NotInitialized):
                self.send(peer, message, may_block=False)
            return
        try:
            link.send(message, may_block=False)
        except LinkClosed as error:
            self._lose(peer, str(error))

    def post_ints(self, peer: Peer, kind: Kind, *values: int) -> None:
        """Sends a small control message of integers without ever blocking."""
        control = encode_ints(*values)
        if peer.is_self:
            self.post(peer, Frame(kind, 0, 0, control, ()))
        else:
            self.post(peer, encode_frame(kind, 0, 0, control))
