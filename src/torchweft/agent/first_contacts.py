"""Messages to workers to which there is no connection yet.

A stopped worker, or one whose host hangs, accepts a connection but does not answer. A thread with a
message for that worker must not wait. Instead the message is kept, and a reactor thread connects
and sends the kept messages in order. A kept call ends by its own time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from torchweft import knobs
from torchweft.agent.lifetime import Lifetime
from torchweft.agent.peers import Outgoing, Peer, Unsent
from torchweft.errors import CallTimeout, NotInitialized, WorkerLost
from torchweft.runtime.reactor import Reactor
from torchweft.transport.link import LinkClosed
from torchweft.wire.frames import Frame


class FirstContacts:
    """Keeps messages until there is a connection to their receivers. Thread-safe.

    Args:
        reactor: Provides the threads that connect.
        lifetime: Whether the worker still takes part.
        connect: Connects to a peer by a deadline; see ``Agent.connect``.
        lose: Declares a peer lost, with the cause.
    """

    def __init__(
        self,
        reactor: Reactor,
        lifetime: Lifetime,
        connect: Callable[[Peer, float], object],
        lose: Callable[[Peer, str], None],
    ) -> None:
        self._reactor = reactor
        self._lifetime = lifetime
        self._connect_by = connect
        self._lose = lose
        self._attempt_s = knobs.CONNECT_TIMEOUT_S.get()

    def keep(self, peer: Peer, unsent: Unsent) -> bool:
        """Keeps a message for ``peer``, and has a thread connect; never blocks.

        Returns:
            Whether the message is kept; if not, there is a connection.

        Raises:
            WorkerLost: The peer is lost.
            NotInitialized: This worker has shut down.
        """
        self._lifetime.check_open()
        with peer.state_lock:
            if peer.link is not None and not peer.unsent:
                return False
            if peer.lost is not None:
                raise peer.lost_error()
            peer.unsent.append(unsent)
            is_first = len(peer.unsent) == 1
        if is_first:
            self._reactor.submit(self._open, peer)
        return True

    def _open(self, peer: Peer, _: object) -> None:
        """Connects, and sends the kept messages; ends when none is left."""
        try:
            with self._reactor.idling():
                while not self._connect(peer):
                    if not self._drop_unwanted(peer):
                        return
            self._send_all(peer)
        except (WorkerLost, NotInitialized) as error:
            self._drop_all(peer, error)

    def connect_soon(self, peer: Peer) -> None:
        """Has a thread connect to a peer without a message to send; never blocks."""
        if not peer.dial_lock.locked():
            self._reactor.submit(self._connect_once, peer)

    def _connect_once(self, peer: Peer, _: object) -> None:
        with self._reactor.idling(), suppress(WorkerLost, NotInitialized):
            self._connect(peer)

    def _connect(self, peer: Peer) -> bool:
        try:
            self._connect_by(peer, monotonic() + self._attempt_s)
        except CallTimeout:
            return False
        return True

    def _send_all(self, peer: Peer) -> None:
        while True:
            unsent = peer.unsent[0]
            if unsent.is_wanted():
                self._send(peer, unsent)
            else:
                unsent.drop(None)
            # Remove it last: later messages must not overtake it.
            with peer.state_lock:
                peer.unsent.popleft()
                if not peer.unsent:
                    return

    def _send(self, peer: Peer, unsent: Unsent) -> None:
        try:
            message = unsent.make()
        except Exception as error:
            unsent.drop(error)
            return
        self.write(peer, message)

    def write(self, peer: Peer, message: Outgoing) -> None:
        """Writes a message to a connected peer, before all kept messages."""
        link = peer.link
        assert link is not None
        assert not isinstance(message, Frame)  # frames are for this worker itself
        try:
            link.send(message, may_block=True)
        except LinkClosed as error:
            self._lose(peer, str(error))
            raise self._lifetime.error_of(peer) from error

    def _drop_unwanted(self, peer: Peer) -> bool:
        """Drops messages that are no longer wanted; returns whether any are left."""
        with peer.state_lock:
            dropped = [unsent for unsent in peer.unsent if not unsent.is_wanted()]
            for unsent in dropped:
                peer.unsent.remove(unsent)
            is_left = bool(peer.unsent)
        for unsent in dropped:
            unsent.drop(None)
        return is_left

    def _drop_all(self, peer: Peer, error: Exception) -> None:
        with peer.state_lock:
            dropped = list(peer.unsent)
            peer.unsent.clear()
        for unsent in dropped:
            unsent.drop(error)
