"""Incoming messages: which thread reads a connection, and which handler gets each message.

A handler is *inline* or a *task*. Inline handlers run on the thread that reads the connection:
they neither block nor run user code. Tasks run where the reactor finds a thread for them.

One thread reads a connection at a time: one of the reactor that has claimed it, or one that waits
for a message of the peer (``engine.worker.calls``). One thread at a time handles what was read.
"""

from __future__ import annotations

import logging
from _thread import get_ident
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from torchweft.engine.codec.tensors import shared_ranges
from torchweft.engine.io.link import POLL_S, SEND_PATIENCE_S, Link, LinkClosed
from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.threads import interrupts
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.thread_modes import end_modes
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ProtocolError

_log = logging.getLogger("torchweft")

Handler = Callable[[Peer, Frame], None]
CallHandler = Callable[[Peer, Any], None]
TakeReply = Callable[[int, Frame], bool]
# Looking up a member of an enumeration takes longer than comparing it.
_REPLY, _CALL = int(Kind.REPLY), int(Kind.CALL)


class Receiver:
    """Reads the connections of one worker, and dispatches each message. Thread-safe.

    Args:
        reactor: Runs tasks, and reports which connections can be read.
        lose: Declares a peer lost, with the cause.
    """

    def __init__(self, reactor: Reactor, lose: Callable[[Peer, str], None]) -> None:
        self._reactor = reactor
        self._lose = lose
        self._routes: dict[int, tuple[Handler, bool]] = {}
        self._take_reply: TakeReply = lambda worker, frame: False
        self._take_up: type[ServedCall] | None = None
        self._serve: CallHandler = _ignore
        self._refuse: CallHandler = _ignore
        self.watched: set[Link] = set()
        """The links that have a watcher."""
        self.discard: Handler = _ignore
        """Called with replies that no call waits for any more; a layer above may replace it."""

    # What handles each kind of message

    def on(self, kind: Kind, handler: Handler, *, inline: bool) -> None:
        """Registers ``handler`` for frames of ``kind``.

        A message may concern what this worker keeps for others than its sender. Its handler first
        checks that the sender is entitled to it: that the sender leads the pass, or owns the value,
        or whatever ``docs/security/members.md`` says, which has a row for each kind.

        Args:
            kind: The kind of message.
            handler: Called with the peer and the frame. Raises ProtocolError for a message that
                violates the protocol; the sender is turned away by name.
            inline: Whether it runs in the thread that reads.
        """
        self._routes[kind] = handler, inline

    def on_calls(self, handler: CallHandler, refuse: CallHandler, call: type[ServedCall]) -> None:
        """Registers the handlers for calls of other workers.

        Args:
            handler: Called, as a task, with the peer and the call.
            refuse: Called instead if too many calls of the peer wait already.
            call: The type of the object that is made of a call as soon as it is read.
        """
        self._serve, self._refuse, self._take_up = handler, refuse, call

    def on_replies(self, take: TakeReply) -> None:
        """Registers ``take`` for replies; it returns whether a call waits for the reply.

        Args:
            take: Called with the sender's id and the frame.
        """
        self._take_reply = take

    def dispatch(self, peer: Peer, frame: Frame) -> None:
        """Handles one message, or queues a task that does.

        Raises:
            ProtocolError: The message violates the protocol.
        """
        if frame.kind == _REPLY:
            if not self._take_reply(peer.id, frame):
                self._reactor.urgent.append((self.discard, peer, frame))
            return
        if frame.kind == _CALL and self._take_up is not None:
            call = self._take_up(peer, frame, monotonic())
            size_bytes = sum(map(len, frame.buffers), len(frame.control))
            if not self._reactor.tasks.offer((self._serve, peer, call), peer.id, size_bytes):
                self._reactor.urgent.append((self._refuse, peer, call))
            return
        route = self._routes.get(frame.kind)
        if route is None:
            raise ProtocolError(f"message kind {frame.kind} is unknown")
        handler, is_inline = route
        if not is_inline:
            self._reactor.tasks.append((handler, peer, frame), peer.id)
            return
        try:
            handler(peer, frame)
        except ProtocolError:
            raise
        except BaseException:
            log_exception("a message of worker %r could not be handled", peer.name)

    def deliver(self, peer: Peer, frame: Frame) -> None:
        """Handles a frame from this worker to itself, which touches no socket."""
        reactor = self._reactor
        self.dispatch(peer, frame)
        # Not by counts: another thread may have taken an earlier task meanwhile, and be in it long.
        if reactor.tasks.ready or reactor.urgent:
            reactor.wake()

    # Reading

    def read(
        self,
        peer: Peer,
        link: Link,
        *,
        may_receive: bool = True,
        may_block: bool = False,
        may_spin: bool = False,
        may_serve: bool = False,
    ) -> bool:
        """Receives data, and handles complete frames unless another thread does so now.

        Args:
            peer: The sender.
            link: The connection.
            may_receive: Whether the caller has claimed the link; else only handles what was read.
            may_block: Whether to wait for a moment if no data is there.
            may_spin: Whether to look for data again and again for a moment, where that pays.
            may_serve: Whether calls that come alone may run here.

        Returns:
            As ``Link.receive``.
        """
        incoming, is_claimed = link.incoming, True
        try:
            try:
                if may_receive and may_serve and self._may_serve(peer, link):
                    try:
                        is_claimed = link.receive(may_block, may_spin, link.serving)
                        link.expects_usual = not incoming
                    finally:
                        self._reactor.end_tasks()
                elif may_receive:
                    link.receive(may_block, may_spin)
            finally:
                while incoming and link.handling.acquire(False):
                    try:
                        while incoming:
                            frame = incoming.popleft()
                            if link.watcher is not None:
                                link.watcher.received(frame)
                            self.dispatch(peer, frame)
                    except ProtocolError:
                        incoming.clear()
                        raise
                    finally:
                        link.handling.release()
        except LinkClosed as error:
            with link.handling:  # Another thread may be handling what came before the end.
                pass
            self._lose(peer, str(error))
        except ProtocolError as error:
            self.turn_away(peer, error)
        except MemoryError:
            self._lose(peer, "there is no memory for a message of it")
        return is_claimed

    def hear_last(self, peer: Peer, link: Link) -> None:
        """Handles what a worker has sent before its connection ended: it may tell why.

        If another thread reads the link, waits until that one has, for ``SEND_PATIENCE_S`` at most.
        """
        may_read = get_ident() != interrupts.main_id
        limit_s = monotonic() + SEND_PATIENCE_S
        while peer.lost is None and not link.is_free and monotonic() < limit_s:
            if may_read and link.claim():
                try:
                    self.read(peer, link)
                finally:
                    link.unclaim()
                return
            sleep(POLL_S)

    def take(self, peer: Peer, frame: Frame) -> None:
        """Handles a frame that a waiting thread has read for itself."""
        link = peer.link
        if link is not None and link.watcher is not None:
            link.watcher.received(frame)
        try:
            self.dispatch(peer, frame)
        except ProtocolError as error:
            self.turn_away(peer, error)

    def take_over(self, peer: Peer, link: Link) -> None:
        """Handles what a waiting thread has read, and reads on; a task."""
        link.native.is_handed_over = False  # First: what comes from now on needs another look.
        may_receive = link.claim()
        try:
            self.read(peer, link, may_receive=may_receive)
        finally:
            if may_receive:
                link.unclaim()
                self._reactor.resume_reading(link.read_fd)

    def postpone(self, handler: Callable[[Peer, Any], None], peer: Peer, message: Any) -> None:
        """Has an urgent task handle what cannot be handled where it was read."""

        def handle(peer: Peer, message: Any) -> None:
            try:
                handler(peer, message)
            except ProtocolError as error:
                self.turn_away(peer, error)

        self._reactor.submit(handle, peer, message)

    def turn_away(self, peer: Peer, error: ProtocolError) -> None:
        """Declares a worker lost that violated the protocol."""
        _log.error("closing the connection to worker %r: %s", peer.name, error)
        self._lose(peer, f"it sent an invalid message: {error}")

    def on_readable(self, peer: Peer, link: Link) -> None:
        """Reads a connection that has data, or whose tasks this thread has just run.

        In the second case it looks for the next request for a moment.
        """
        reactor, fd = self._reactor, link.read_fd
        has_run_tasks = bool(reactor.unarmed.pop(fd, 0))
        # After answers only, other threads of this worker go on and need the interpreter lock.
        if (has_run_tasks and not link.brought_tasks) or not link.claim():
            if has_run_tasks:
                reactor.resume_reading(fd)
            return  # A waiting thread that reads this link arms it again when it is done.
        is_claimed = True
        try:
            is_claimed = self.read(peer, link, may_spin=has_run_tasks, may_serve=True)
            if is_claimed and link.parser.large is not None and reactor.begin_read():
                try:
                    self._read_rest(peer, link)
                finally:
                    reactor.end_read()
        finally:
            if is_claimed:
                link.unclaim()
                link.brought_tasks = bool(reactor.tasks.ready)
                if link.native and (link.brought_tasks or reactor.urgent):
                    reactor.leave_unarmed(fd)
                else:
                    reactor.resume_reading(fd)

    def _may_serve(self, peer: Peer, link: Link) -> bool:
        """Returns whether the native twin may serve calls of a link that come alone.

        If so, this thread counts as one that runs tasks: ``Reactor.end_tasks`` must follow.
        """
        reactor = self._reactor
        if not link.expects_usual:
            return False
        if link.serving is None and peer.server is not None:
            fd, tasks = link.read_fd, reactor.tasks
            arms = link.handling, reactor.unarmed, reactor.leave_unarmed
            before = link.incoming, tasks.ready, reactor.urgent, self.watched, shared_ranges
            link.serving = peer.server, peer, fd, *arms, self._take_up, end_modes, *before
        return link.serving is not None and reactor.before_task is None and reactor.begin_tasks()

    def _read_rest(self, peer: Peer, link: Link) -> None:
        """Waits for the rest of a large frame: an event for each piece would cost more.

        Ends earlier if no byte arrives within a tick.
        """
        bytes_received = -1
        while link.parser.large is not None and link.bytes_received != bytes_received:
            bytes_received = link.bytes_received
            self.read(peer, link, may_block=True)


def _ignore(peer: Peer, message: object) -> None:
    """Does nothing: no handler is registered yet."""
