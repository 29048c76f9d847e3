"""Outgoing messages: they are written at once, or wait for the first connection to their receiver.

A stopped worker, or one whose host hangs, accepts a connection but does not answer. A thread with a
message for that worker must not wait. Instead the message is kept, and a reactor thread connects
and sends the kept messages in order. A kept call ends by its own time limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from time import monotonic
from typing import Any

from torchweft import knobs
from torchweft.engine.io.link import LinkClosed
from torchweft.engine.protocol.sessions import Outgoing, Unsent
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.wire.frames import Buffer, Frame, encode_frame
from torchweft.engine.wire.messages import Kind, encode_ints
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.receiving import Receiver
from torchweft.errors import CallTimeout, NotInitialized, WorkerLost

_MOST_HELD = 64


class Lifetime:
    """The steps by which one worker ends; none is undone.

    Args:
        name: The worker's name.

    Attributes:
        is_leaving: Whether the group is leaving, so that the end of a connection is not a loss.
        is_closed: Whether the worker has shut down.
        has_failed: Whether its program has failed and told the others, which end because of that.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_leaving = False
        self.is_closed = False
        self.has_failed = False

    def check_open(self) -> None:
        """Raises NotInitialized where the worker has shut down."""
        if self.is_closed:
            raise NotInitialized(
                f"worker {self._name!r} has shut down; call init_rpc to join a group again"
            )

    def error_of(self, peer: Peer) -> Exception:
        """Returns the error for a message that can no longer be sent to ``peer``."""
        if peer.lost is not None:
            return peer.lost_error()
        return NotInitialized(
            f"worker {self._name!r} is shutting down; the call to {peer.name!r} was not made"
        )


class Sender:
    """Sends the messages of one worker. Thread-safe.

    Each write wakes the receiver, and takes as long as a small call. So small answers are held
    while more calls wait to run. They are written with the next message to the same peer, before a
    function that takes long, and after ``knobs.REARM_S`` in any case.

    Args:
        reactor: Provides the threads that connect; signals when answers may no longer be held.
        lifetime: Whether the worker still takes part.
        receiver: Takes messages to this worker itself.
        connect: Connects to a peer by a deadline; see ``Agent.connect``.
        lose: Declares a peer lost, with the cause.
    """

    def __init__(
        self,
        reactor: Reactor,
        lifetime: Lifetime,
        receiver: Receiver,
        connect: Callable[[Peer, float], object],
        lose: Callable[[Peer, str], None],
    ) -> None:
        self._reactor = reactor
        self._lifetime = lifetime
        self._receiver = receiver
        self._connect_to = connect
        self._lose = lose
        self._attempt_s = knobs.CONNECT_TIMEOUT_S.get()
        reactor.on_pause = self.write_held

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
        is_kept = (link is None or peer.unsent) and self.keep(peer, Unsent(message))
        if not is_kept:
            self.write(peer, message, may_block=may_block)

    def post(self, peer: Peer, message: Outgoing) -> None:
        """Sends one frame without ever blocking; for inline handlers and jobs of the timers.

        Raises nothing if the peer is lost: threads that wait for the peer are told otherwise.
        """
        if peer.lost is None and not self._lifetime.is_closed:
            with contextlib.suppress(WorkerLost, NotInitialized):
                self.send(peer, message, may_block=False)

    def post_ints(self, peer: Peer, kind: Kind, *values: int, tail: bytes = b"") -> None:
        """Sends a small control message of integers, and bytes, without ever blocking."""
        control = encode_ints(*values) + tail
        if peer.is_self:
            self.post(peer, Frame(kind, 0, 0, control, ()))
        else:
            self.post(peer, encode_frame(kind, 0, 0, control))

    # First contacts

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
            if peer.lost is not None and (peer.link is None or peer.unsent):
                raise peer.lost_error()
            is_kept = peer.unsent.keep(unsent, is_linked=peer.link is not None)
        # Also if an earlier message waits: the main thread may have been interrupted here.
        if is_kept and not peer.first_contact.locked():
            self._reactor.submit(self._open, peer)
        return is_kept

    def _open(self, peer: Peer, _: object) -> None:
        """Connects and sends the kept messages, unless another thread does; until none is left."""
        while peer.unsent and peer.first_contact.acquire(blocking=False):
            try:
                with self._reactor.idling():
                    while not self._connect(peer):
                        if not self._drop(peer, peer.unsent.take_unwanted, None):
                            break
                if peer.link is not None:
                    self._send_all(peer)
            except (WorkerLost, NotInitialized) as error:
                self._drop(peer, peer.unsent.take_all, error)
            finally:
                peer.first_contact.release()

    def _drop(self, peer: Peer, take: Callable[[], list[Unsent]], error: Exception | None) -> bool:
        """Drops the messages that ``take`` returns; returns whether any are left."""
        with peer.state_lock:
            dropped, is_left = take(), bool(peer.unsent)
        for unsent in dropped:
            unsent.drop(error)
        return is_left

    def connect_soon(self, peer: Peer) -> None:
        """Has a thread connect to a peer without a message to send; never blocks."""
        if not peer.dial_lock.locked():
            self._reactor.submit(self._connect_once, peer)

    def _connect_once(self, peer: Peer, _: object) -> None:
        with self._reactor.idling(), contextlib.suppress(WorkerLost, NotInitialized):
            self._connect(peer)

    def _connect(self, peer: Peer) -> bool:
        try:
            self._connect_to(peer, monotonic() + self._attempt_s)
        except CallTimeout:
            return False
        return True

    def _send_all(self, peer: Peer) -> None:
        while peer.unsent:
            unsent = peer.unsent[0]
            try:
                message = unsent.make() if unsent.is_wanted() else None
                error = None
            except Exception as failure:
                message, error = None, failure
            if message is None:
                unsent.drop(error)
            else:
                self.write(peer, message)
            # Remove it last: later messages must not overtake it.
            with peer.state_lock:
                peer.unsent.popleft()

    def write(self, peer: Peer, message: Outgoing, *, may_block: bool = True) -> None:
        """Writes a message to a connected peer, before all kept messages."""
        link: Any = peer.link
        try:
            link.send(message, may_block=may_block)
            return
        except LinkClosed as error:
            closed = error
        raise self.failed(peer, closed)  # Here, so that it does not show the other error.

    def failed(self, peer: Peer, error: OSError) -> Exception:
        """Declares a peer lost, as nothing can be written; returns the error of the message."""
        self._lose(peer, str(error))
        return self._lifetime.error_of(peer)

    # Held messages

    def answer(self, peer: Peer, part: Buffer) -> None:
        """Sends an answer (one whole frame) now, or together with later answers.

        Raises:
            WorkerLost: The peer cannot be reached.
            NotInitialized: This worker has shut down.
        """
        link = peer.link
        if link is None:
            self.send(peer, [part])
        elif self._reactor.tasks.ready:
            self._hold(peer, link, [part])
        else:
            self.write(peer, [part])

    def _hold(self, peer: Peer, link: Any, parts: list[Buffer]) -> None:
        reactor = self._reactor
        try:
            count = link.hold(parts)
            reactor.held[link] = peer
            if count >= _MOST_HELD:
                link.flush()
            elif count == len(parts):
                reactor.on_unarmed()  # The timer thread writes held messages, too.
        except LinkClosed as error:
            raise self.failed(peer, error) from error

    def write_held(self) -> None:
        """Writes all held messages; never blocks."""
        held = self._reactor.held
        while held:
            try:
                link, peer = held.popitem()
            except KeyError:
                return  # Another thread has taken the last one.
            try:
                link.flush()
            except LinkClosed as error:
                self._lose(peer, str(error))
