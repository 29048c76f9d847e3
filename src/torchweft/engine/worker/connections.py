"""The established connections of one worker: makes sockets into links that are read.

It watches and repairs sessions as ``torchweft.engine.protocol.connecting`` decides.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchweft import knobs
from torchweft.engine.channels.memory import BufferPool
from torchweft.engine.io.link import Link, LinkClosed
from torchweft.engine.io.ring import Ring
from torchweft.engine.io.session import ResumableLink, keep_alive, position_in, probe_interval_s
from torchweft.engine.protocol.connecting import (
    FAREWELL_BYTES,
    Action,
    Lose,
    Patience,
    Redial,
    Terms,
    failure_of,
)
from torchweft.engine.protocol.sessions import Rounds
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.threads.timers import Timers
from torchweft.engine.wire.frames import Frame, FrameParser
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.receiving import Receiver
from torchweft.errors import ConfigurationError, ProtocolError


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
    """All connections for messages of one worker; watches and repairs the sessions. Thread-safe.

    Args:
        reactor: Reports which connections can be read and written; provides the threads that dial.
        timers: Call ``tick``.
        receiver: Reads the connections.
        pool: Memory for received messages.
        patience: How long contact with another worker may be lost.
        lose: Declares a peer lost, with the cause.

    Attributes:
        redial: Makes a new connection for a session; see ``Connector.redial``.
    """

    redial: Callable[[Peer, ResumableLink], None]

    def __init__(
        self,
        reactor: Reactor,
        timers: Timers,
        receiver: Receiver,
        pool: BufferPool,
        patience: Patience,
        lose: Callable[[Peer, str], None],
    ) -> None:
        self.patience = patience
        self._reactor = reactor
        self._receiver = receiver
        self._pool = pool
        self._lose = lose
        detection_s = patience.detection_s
        self._rounds = Rounds(detection_s, float(probe_interval_s(detection_s)))
        self._watched: dict[int, tuple[Peer, ResumableLink]] = {}
        self._timer = timers.add(self.tick)
        self._limit_bytes = knobs.SESSION_LIMIT_BYTES.get()
        self._lock = threading.RLock()
        self._links: list[Link] = []
        self._ended_traffic = Traffic(0, 0)
        self._is_closed = False
        self.leave_reason = ""
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

    def make_link(
        self,
        connection: socket.socket,
        peer: Peer,
        terms: Terms | None,
        ring: Ring | None = None,
    ) -> Link:
        """Wraps a connected socket; with terms, in a session."""
        parser = FrameParser(
            self._pool.lease,
            knobs.RECEIVE_BUFFER_BYTES.get(),
            knobs.CONTROL_LIMIT_BYTES.get(),
            knobs.FRAME_LIMIT_BYTES.get(),
        )
        if terms is None:
            link = Link(connection, parser, self._when_full, ring)
        else:
            keep_alive(connection, self.patience.detection_s)
            on_break = functools.partial(self._on_break, peer)
            link = ResumableLink(connection, parser, self._when_full, on_break, self._limit_bytes)
        if self.on_made is not None:
            self.on_made(link, peer)
        return link

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
                self._watch_session(peer, link)
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
        with peer.state_lock:
            peer.connecting.resumed(time.monotonic())
        _log.info("the connection to worker %r was made again", peer.name)
        link.report_break("end of file")  # It may have broken before ``resumed`` was noted.
        self._watch(peer, link)
        link.flush()

    def _watch(self, peer: Peer, link: Link) -> None:
        bound, receiver, reactor = functools.partial, self._receiver, self._reactor
        if link.native is not None:
            hand_over = reactor.urgent.append, (receiver.take_over, peer, link)
            link.native.watch(reactor.epoll_fd, reactor.wake_fd, *hand_over)
        reactor.watch_writing(link.write_fd, bound(self._on_writable, peer, link))
        reactor.watch_reading(link.read_fd, bound(receiver.on_readable, peer, link), link.arm)
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
        reason = self.leave_reason.encode()[:FAREWELL_BYTES]
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

    # What happens to sessions

    def _watch_session(self, peer: Peer, link: ResumableLink) -> None:
        """Watches a new session, unless it has ended already."""
        with self._lock:
            if peer.connecting.has_session:
                self._watched[peer.id] = peer, link
        self._timer.wake_by(time.monotonic() + self._rounds.interval_s)

    def forget(self, peer: Peer) -> None:
        """Stops watching the session of a peer, if there is one: the session has ended."""
        with peer.state_lock:
            peer.connecting.end()
        with self._lock:
            self._watched.pop(peer.id, None)

    def _on_break(self, peer: Peer, link: ResumableLink, cause: str, *, is_answer: bool) -> None:
        """Handles the end of a session's connection: redials, or declares the peer lost."""
        self.pause(link)
        with peer.state_lock:
            is_news = not peer.connecting.is_broken
            actions = peer.connecting.broke(time.monotonic(), cause, is_answer=is_answer)
            is_news &= peer.connecting.is_broken
        if is_news:
            _log.info("the connection to worker %r broke: %s; it is made again", peer.name, cause)
        # Do not leave this to the timer thread: callers wait for every millisecond of a break.
        for action in actions:
            if isinstance(action, Lose):
                self._lose(peer, action.cause)
            else:
                self._act(peer, [action])

    def silence_s(self, peer: Peer) -> float:
        """Returns the seconds since a peer was last heard; 0 without a session."""
        now_s = time.monotonic()
        if peer.id in self._watched:
            self._listen(*self._watched[peer.id], now_s)
        return peer.connecting.silence_s(now_s)

    # What is due

    def tick(self, now_s: float) -> float:
        """Updates when each peer was last heard, and performs due actions; a timer job."""
        with self._lock:
            watched = list(self._watched.values())
        due_s = math.inf
        must_acknowledge = bool(watched) and self._rounds.must_acknowledge(now_s)
        for peer, link in watched:
            try:
                if self._rounds.must_prompt(self._listen(peer, link, now_s)):
                    link.prompt()
                due_s = min(due_s, self._look_at(peer, now_s))
                if must_acknowledge:
                    link.acknowledge()
            except Exception:  # The other sessions are looked after nevertheless.
                log_exception("the session with worker %r could not be looked after", peer.name)
        return min(due_s, self._rounds.acknowledge_at_s) if watched else math.inf

    def _look_at(self, peer: Peer, now_s: float) -> float:
        """Performs the due actions of one session; returns when to look again."""
        with peer.state_lock:
            actions = peer.connecting.step(now_s)
            due_s = min(peer.connecting.due_s(), now_s + self._rounds.interval_s)
        self._act(peer, actions)
        return due_s

    def _listen(self, peer: Peer, link: ResumableLink, now_s: float) -> float:
        """Notes when the peer was last heard; returns the seconds since then, 0 if unknown."""
        silence_s = link.silence_s()
        if silence_s is None:
            return 0.0
        with peer.state_lock:
            peer.connecting.heard(now_s - silence_s)
        return silence_s

    # Actions

    def _act(self, peer: Peer, actions: list[Action]) -> None:
        """Leaves actions to other threads: they take too long for the timer thread."""
        for action in actions:
            if isinstance(action, Redial):
                self._reactor.submit(self._dial, peer)
            else:
                self._reactor.submit(self._give_up, (peer, action.cause))

    def _give_up(self, peer_and_cause: tuple[Peer, str], _: object) -> None:
        self._lose(*peer_and_cause)

    def _dial(self, peer: Peer, _: object) -> None:
        """Makes a new connection for a session, or asks the peer to; blocks for a while."""
        link = peer.link
        assert isinstance(link, ResumableLink)
        try:
            with self._reactor.idling():
                self.redial(peer, link)
        except LinkClosed:
            return
        except (OSError, ProtocolError, ConfigurationError) as error:
            failure, cause = failure_of(error), str(error)
        else:
            return
        link.report_break(cause)
        now_s = time.monotonic()
        with peer.state_lock:
            actions = peer.connecting.redial_failed(now_s, failure, cause)
        self._act(peer, actions)
        self._timer.wake_by(self._look_at(peer, now_s))


def _on_acknowledged(peer: Peer, frame: Frame) -> None:
    if isinstance(peer.link, ResumableLink):
        peer.link.acknowledged(position_in(frame.control))


def _on_goodbye(peer: Peer, frame: Frame) -> None:
    with peer.state_lock:
        peer.connecting.goodbye(bytes(frame.control[:FAREWELL_BYTES]))
    if isinstance(peer.link, ResumableLink):
        peer.link.acknowledge()  # The peer waits for this acknowledgement.


_log = logging.getLogger("torchweft")
