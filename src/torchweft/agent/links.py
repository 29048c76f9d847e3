"""The established connections of one worker: makes sockets into links that are read."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchweft import knobs
from torchweft.agent.contacts import Contacts
from torchweft.agent.peers import Peer
from torchweft.agent.receiving import Receiver
from torchweft.channel.memory import BufferPool
from torchweft.errors import ProtocolError
from torchweft.native import native
from torchweft.protocol.connecting import FAREWELL_BYTES, Patience
from torchweft.protocol.greetings import Terms
from torchweft.runtime.reactor import Reactor
from torchweft.transport.keepalive import keep_alive
from torchweft.transport.link import Link, LinkClosed
from torchweft.transport.native_link import NativeLink, NativeResumableLink
from torchweft.transport.resumable import ResumableLink, position_in
from torchweft.wire.frames import Frame, FrameParser
from torchweft.wire.messages import Kind


class Traffic(NamedTuple):
    """Bytes that this worker exchanged with all others, tensors and control alike.

    Attributes:
        bytes_sent: Bytes that were sent, or copied for another worker.
        bytes_received: Bytes that arrived, with those of tensors in memory of the sender.
        bytes_lent: Bytes of tensors that other workers use in this worker's shared memory: none of
            them was copied.
    """

    bytes_sent: int
    bytes_received: int
    bytes_lent: int = 0


def sum_of(parts: Iterable[Traffic]) -> Traffic:
    """Returns the traffic of all parts together."""
    return Traffic(*map(sum, zip(*parts, strict=True)))


def _traffic_of(link: Link) -> Traffic:
    return Traffic(link.bytes_sent, link.bytes_received)


class Links:
    """All connections for messages of one worker. Thread-safe.

    Args:
        reactor: Reports which connections can be read and written.
        receiver: Reads the connections.
        pool: Memory for received messages.
        contacts: Watches and repairs sessions.
        patience: How long contact with another worker may be lost.
        lose: Declares a peer lost, with the cause.
    """

    def __init__(
        self,
        reactor: Reactor,
        receiver: Receiver,
        pool: BufferPool,
        contacts: Contacts,
        patience: Patience,
        lose: Callable[[Peer, str], None],
    ) -> None:
        self.patience = patience
        self._reactor = reactor
        self._receiver = receiver
        self._pool = pool
        self._lose = lose
        self._contacts = contacts
        self._limit_bytes = knobs.SESSION_LIMIT_BYTES.get()
        self._lock = threading.RLock()
        self._links: list[Link] = []
        self._ended_traffic = Traffic(0, 0)
        self._is_closed = False
        self.farewell = ""
        """Why this worker leaves, for peers that may not expect it."""
        self.on_made: Callable[[Link, Peer], None] | None = None
        """Called with each new link before it is used, while traced."""
        receiver.on(Kind.ACKNOWLEDGED, _on_acknowledged, inline=True)
        receiver.on(Kind.GOODBYE, _on_goodbye, inline=True)

    def all(self) -> list[Link]:
        """Returns the links that have not ended."""
        with self._lock:
            return list(self._links)

    def mend(self) -> None:
        """Has written what a signal handler kept a thread from writing."""
        for link in self.all():
            link.mend()

    def traffic(self) -> Traffic:
        """Returns the bytes of all links, including ended links."""
        with self._lock:
            return sum_of([self._ended_traffic, *map(_traffic_of, self._links)])

    def make_link(self, connection: socket.socket, peer: Peer, terms: Terms | None) -> Link:
        """Wraps a connected socket; with terms, in a session."""
        parser = FrameParser(
            self._pool.lease,
            knobs.RECEIVE_BUFFER_BYTES.get(),
            knobs.CONTROL_LIMIT_BYTES.get(),
            knobs.FRAME_LIMIT_BYTES.get(),
        )
        link: Link
        if terms is None and native is not None:
            link = NativeLink(connection, parser, self._when_full, peer)
        elif terms is None:
            link = Link(connection, parser, self._when_full)
        else:
            keep_alive(connection, self.patience.detection_s)
            on_break = functools.partial(self._on_break, peer)
            options = parser, self._when_full, on_break, self._limit_bytes
            if native is not None and isinstance(connection, socket.socket):
                link = NativeResumableLink(connection, *options, peer)
            else:
                link = ResumableLink(connection, *options)
        if self.on_made is not None:
            self.on_made(link, peer)
        return link

    def _on_break(self, peer: Peer, link: ResumableLink, cause: str, *, is_answer: bool) -> None:
        self.pause(link)
        self._contacts.on_break(peer, cause, is_answer=is_answer)

    def _when_full(self, link: Link) -> None:
        self._reactor.resume_writing(link.write_fd)

    def adopt(self, peer: Peer, link: Link, terms: Terms | None) -> None:
        """Installs a new link as the peer's, and starts to read it.

        Raises:
            LinkClosed: The link comes too late; it has been closed.
        """
        # Race: the link may break at once, and be resumed before it is even watched.
        resuming = link.resuming if isinstance(link, ResumableLink) else contextlib.nullcontext()
        with resuming:
            obstacle = self._give(peer, link, terms)
            if obstacle:
                link.close()
                raise LinkClosed(obstacle)
            self._watch(peer, link)

    def _give(self, peer: Peer, link: Link, terms: Terms | None) -> str:
        """Installs a link as the peer's; returns the obstacle, or an empty string."""
        with self._lock:
            if self._is_closed:
                return "this worker has shut down"
            self._links.append(link)
            obstacle = peer.adopt(link, terms, self.patience)
            if obstacle:
                self._links.pop()
            elif isinstance(link, ResumableLink):
                self._contacts.watch(peer, link)
        return obstacle

    def resume(
        self, peer: Peer, link: ResumableLink, connection: socket.socket, position: int
    ) -> None:
        """Continues a session over a new connection; the peer has received up to ``position``.

        Raises:
            LinkClosed: The session has ended meanwhile.
            ProtocolError: The session cannot continue at ``position``: the peer is lost.
        """
        self.pause(link)
        keep_alive(connection, self.patience.detection_s)
        try:
            link.resume(connection, position)
        except ProtocolError as error:
            self._lose(peer, f"its session cannot go on: {error}")
            raise
        self._contacts.on_resumed(peer, link)
        self._watch(peer, link)
        link.write_held()

    def _watch(self, peer: Peer, link: Link) -> None:
        bound, receiver, reactor = functools.partial, self._receiver, self._reactor
        if isinstance(link, NativeLink):
            hand_over = reactor.urgent.append, (receiver.take_over, peer, link)
            link.native.watch(reactor.epoll_fd, reactor.wake_fd, *hand_over)
        reactor.watch_writing(link.write_fd, bound(self._on_writable, peer, link))
        reactor.watch_reading(
            link.read_fd,
            bound(receiver.on_readable, peer, link),
            bound(receiver.after_tasks, peer, link) if link.may_spin else None,
        )
        if link.is_broken:
            self.pause(link)  # Race: the link broke, and was paused before it was watched.

    def _on_writable(self, peer: Peer, link: Link) -> None:
        try:
            link.flush()
        except LinkClosed as error:
            self._receiver.hear_last(peer, link)
            self._lose(peer, str(error))

    def pause(self, link: Link) -> None:
        """Stops watching a link that has no connection now."""
        self._reactor.forget(link.read_fd)
        self._reactor.forget(link.write_fd)

    def end(self, link: Link) -> None:
        """Ends a link for good; its reader stops."""
        self.pause(link)
        link.hang_up()
        # Not in this thread, which may be the reader of the link.
        self._reactor.submit(self._free, link)

    def _free(self, link: Link, _: object) -> None:
        """Frees the resources of an ended link once no thread uses them."""
        with self._reactor.idling():
            is_free = link.free()
        with self._lock:
            if is_free and link in self._links:
                self._links.remove(link)
                self._ended_traffic = sum_of([self._ended_traffic, _traffic_of(link)])

    def say_goodbye(self, timeout_s: float) -> None:
        """Refuses new links, and waits, at most ``timeout_s``, until all data has been written."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
        links = self.all()
        reason = self.farewell.encode()[:FAREWELL_BYTES]
        for link in links:
            link.say_goodbye(reason)
        for link in links:
            link.drain(end_s - time.monotonic())

    def abandon(self) -> None:
        """Frees all descriptors, in a forked process: the connections are the parent's."""
        for link in self._links:
            link.abandon()

    def close(self, *, is_in_use: bool) -> None:
        """Ends all links, and frees their descriptors unless some thread still uses them."""
        for link in self.all():
            if is_in_use:
                link.hang_up()
            else:
                link.close()


def _on_acknowledged(peer: Peer, frame: Frame) -> None:
    if isinstance(peer.link, ResumableLink):
        peer.link.acknowledged(position_in(frame.control))


def _on_goodbye(peer: Peer, frame: Frame) -> None:
    with peer.state_lock:
        peer.connecting.goodbye(bytes(frame.control[:FAREWELL_BYTES]))
    if isinstance(peer.link, ResumableLink):
        peer.link.acknowledge()  # The peer waits for this acknowledgement.
