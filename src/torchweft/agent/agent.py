"""The agent: one worker's end of all connections, calls and threads.

It moves frames and knows nothing of functions, gradients or references; the layers above tell
it, by ``on``, what to do with each kind of message.

A handler is *inline* or a *task*. Inline handlers run on the thread that reads the connection:
they neither block nor run user code. Tasks run where the reactor finds a thread for them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.agent.acceptor import Acceptor
from torchweft.agent.answers import Answers
from torchweft.agent.calls import PendingCall
from torchweft.agent.connector import Connector, verdict_in
from torchweft.agent.contacts import Contacts
from torchweft.agent.dial_errors import Speechless
from torchweft.agent.first_contacts import FirstContacts
from torchweft.agent.housekeeper import Housekeeper, Job
from torchweft.agent.lanes import OWN, Lanes
from torchweft.agent.links import Links, Traffic
from torchweft.agent.members import Members
from torchweft.agent.mishaps import log_mishap
from torchweft.agent.open_calls import OpenCalls
from torchweft.agent.peers import Outgoing, Peer, Unreachable, Unsent
from torchweft.agent.protection import Protection
from torchweft.agent.reactor import Reactor
from torchweft.agent.served_calls import Cancelling
from torchweft.agent.slots import Slots
from torchweft.agent.switching import ShortSwitches
from torchweft.agent.upkeep import Upkeep
from torchweft.channel.choice import describe
from torchweft.channel.cma import Nonce
from torchweft.channel.memory import BufferPool
from torchweft.errors import CallTimeout, NotInitialized, ProtocolError, WorkerLost
from torchweft.protocol.calls import ServedCall
from torchweft.protocol.connecting import Patience
from torchweft.protocol.membership import Registration
from torchweft.transport.link import Link, LinkClosed
from torchweft.transport.spinning import Spinning
from torchweft.wire.frames import Frame, encode_frame
from torchweft.wire.messages import Kind, encode_ints

_log = logging.getLogger("torchweft")

Handler = Callable[[Peer, Frame], None]
CallHandler = Callable[[Peer, Any], None]
PeerCallback = Callable[[Peer], None]
_CLOSE_TIMEOUT_S = 5.0
_LEAST_CLOSE_S = 0.5
# Looking up a member of an enumeration takes longer than comparing it.
_REPLY = int(Kind.REPLY)


class _Route(NamedTuple):
    handler: Handler | CallHandler
    is_inline: bool
    take_up: type[ServedCall] | None = None


class Agent:
    """One worker's end of everything.

    Args:
        protection: Who is let in.
        members: The group.
        listeners: Listening sockets whose addresses the others have; owned from here on.
        worker_threads: How many tasks run at a time.
        default_timeout_s: Time limit of calls that name none, in seconds; may be infinite.
        patience: How long contact with another worker may be lost; None for the default.
    """

    def __init__(
        self,
        protection: Protection,
        members: Members,
        listeners: list[socket.socket],
        worker_threads: int,
        default_timeout_s: float,
        patience: Patience | None = None,
    ) -> None:
        self.members = members
        self.peers = members.by_id
        self.find = members.find
        self.me = members.me
        self.info = self.me.info
        self.pool = BufferPool(knobs.POOL_LIMIT_BYTES.get())
        self.pulled_bytes = 0
        self.offered_bytes = 0
        self.default_timeout_s = default_timeout_s
        self.is_leaving = False
        self.slots = Slots()
        self._routes: dict[int, _Route] = {}
        self._watchers: list[PeerCallback] = []
        self._when_lost: PeerCallback = self.tell_watchers
        self._when_disconnected: PeerCallback = lambda peer: None
        self._listeners = listeners
        self._lock = threading.Lock()
        self._is_closed = False
        limits = knobs.QUEUE_LIMIT_CALLS.get(), knobs.QUEUE_LIMIT_BYTES.get()
        lanes = Lanes(*limits, kept=frozenset({OWN, self.me.id}))
        self.reactor = Reactor(f"weft-{self.info.name}", worker_threads, lanes)
        self.calls = OpenCalls(self)
        self.first_contacts = FirstContacts(self)
        self._refuse: CallHandler = lambda peer, call: None
        self.answers = Answers(self)
        self.upkeep = Upkeep(self)
        self._nonce = Nonce()
        self._switches = ShortSwitches()
        if patience is None:
            patience = Patience(knobs.DETECTION_S.get(), knobs.RECONNECT_S.get())
        self.contacts = Contacts(
            patience.detection_s,
            self.reactor,
            lambda peer, link: self._connector.redial(peer, link),
            self.lose,
            self._nudge,
        )
        self.links = Links(self, self.contacts, patience)
        self._connector = Connector(
            self.me.registration,
            members.is_open,
            protection.key,
            describe(self._nonce),
            self.links,
            protection.tls,
            has_secret=protection.has_secret,
        )
        self._acceptor = Acceptor(self._connector, self._lookup, self.first_contacts.connect_soon)
        self.memory = self._connector.memory
        self.housekeeper: Housekeeper | None = None
        self.on(Kind.PULLED, self._on_pulled, inline=True)
        self.on(Kind.VERDICT, self._on_verdict, inline=True)
        self.cancelling = Cancelling(self)

    # Setting up

    def on(self, kind: Kind, handler: Handler, *, inline: bool) -> None:
        """Has ``handler`` called with the sender and each frame of ``kind``.

        Args:
            kind: The kind of message.
            handler: Called with the peer and the frame.
            inline: Whether it runs in the thread that reads.
        """
        self._routes[kind] = _Route(handler, inline)

    def on_calls(self, handler: CallHandler, refuse: CallHandler, call: type[ServedCall]) -> None:
        """Has calls of other workers handled.

        Args:
            handler: Called, as a task, with the peer and the call.
            refuse: Called instead where too much of the peer waits already.
            call: What is made of each as soon as it is read.
        """
        self._routes[Kind.CALL] = _Route(handler, False, call)
        self._refuse = refuse

    def on_lost(self, callback: PeerCallback) -> None:
        """Has ``callback`` run, as a task of its own, after the parts know of a lost worker."""
        self._watchers.append(callback)

    def off_lost(self, callback: PeerCallback) -> None:
        """Takes back ``on_lost``."""
        if callback in self._watchers:
            self._watchers.remove(callback)

    def tell_watchers(self, peer: Peer) -> None:
        """Has the callbacks of ``on_lost`` run; does not wait for them."""
        for callback in list(self._watchers):
            self._submit(callback, peer)

    def start(
        self,
        jobs: list[Job],
        *,
        when_lost: PeerCallback | None = None,
        when_disconnected: PeerCallback | None = None,
    ) -> None:
        """Begins to accept connections; all handlers are known by now.

        Args:
            jobs: Further jobs of the housekeeper.
            when_lost: Run as a task when a worker is lost: tells the parts and, last of all, the
                watchers. By default the watchers only.
            when_disconnected: Run as a task when a connection ends while the group is leaving.
        """
        if when_lost is not None:
            self._when_lost = when_lost
        if when_disconnected is not None:
            self._when_disconnected = when_disconnected
        upkeep = [self.upkeep.help_stalled, self.upkeep.arm_left]
        jobs = [self.calls.expire, self.contacts.tick, *upkeep, *jobs]
        self.housekeeper = Housekeeper(f"weft-{self.info.name}-clock", jobs)
        self.reactor.on_queued = self.upkeep.look_soon
        self.reactor.on_unarmed = self.upkeep.arm_soon
        self.reactor.on_pause = self.answers.write_held
        for listener in self._listeners:
            listener.setblocking(False)
            self.reactor.watch_reading(
                listener.fileno(), functools.partial(self._on_connection, listener)
            )

    def _nudge(self, due_s: float) -> None:
        if self.housekeeper is not None:
            self.housekeeper.nudge(due_s)

    # Peers

    def traffic(self) -> Traffic:
        """Returns the bytes exchanged with all other workers so far."""
        sent, received = self.links.traffic()
        return Traffic(sent + self.offered_bytes, received + self.pulled_bytes)

    def _on_connection(self, listener: socket.socket) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                connection, _ = listener.accept()
                self.reactor.submit(self._accept, connection)
        finally:
            self.reactor.resume_reading(listener.fileno())

    def _accept(self, connection: socket.socket, _: object) -> None:
        with self.reactor.idling():
            self._acceptor.accept(connection)

    def _lookup(self, worker: int, registration: Registration | None) -> Peer | None:
        if registration is not None and registration.id == worker:
            self.take_up(registration)
        peer = self.peers.get(worker)
        return None if peer is self.me else peer

    def take_up(self, registration: Registration, *, is_introduced: bool = True) -> Peer:
        """Takes up a worker of an open group; former ones of its name or rank are lost by now."""
        peer, others = self.members.join(registration, is_introduced=is_introduced)
        for former in others:
            self.lose(former, f"worker {peer.name!r} (rank {peer.info.id}) has taken its place")
        return peer

    def introduce(self, peer: Peer, timeout_s: float) -> None:
        """Has another worker of an open group know this one; see ``Connector.introduce``."""
        self._connector.introduce(peer, timeout_s)

    # Sending

    def send(self, peer: Peer, message: Outgoing, *, may_block: bool = True) -> None:
        """Sends one frame; where there is no connection yet, as soon as there is one.

        Args:
            peer: Who gets it.
            message: The frame.
            may_block: Whether to wait until the socket has room. Who keeps others from reading
                must not: the peer may be waiting for the same.

        Raises:
            WorkerLost: The peer is lost. A peer that turns out to be is told of by ``on_lost``.
            NotInitialized: This worker has shut down.
        """
        if isinstance(message, Frame):
            self.check_open()
            self.deliver(peer, message)
            return
        link = peer.link
        if link is None or peer.unsent:
            if self.first_contacts.keep(peer, Unsent(message)):
                return
            link = peer.link
            assert link is not None
        try:
            link.send(message, may_block=may_block)
        except LinkClosed as error:
            self.lose(peer, str(error))
            raise self.closed_error(peer) from error

    def post(self, peer: Peer, message: Outgoing) -> None:
        """Sends one frame without ever blocking; for inline handlers and housekeeping.

        Nothing is raised if the peer is lost: those who wait for it are told otherwise.
        """
        link = peer.link
        if peer.lost is not None or self._is_closed:
            return
        if isinstance(message, Frame):
            self.deliver(peer, message)
            return
        if link is None or peer.unsent:
            with contextlib.suppress(WorkerLost, NotInitialized):
                self.send(peer, message, may_block=False)
            return
        try:
            link.send(message, may_block=False)
        except LinkClosed as error:
            self.lose(peer, str(error))

    def post_ints(self, peer: Peer, kind: Kind, *values: int) -> None:
        """Sends a small control message of integers without ever blocking."""
        control = encode_ints(*values)
        if peer.is_self:
            self.post(peer, Frame(kind, 0, 0, control, ()))
        else:
            self.post(peer, encode_frame(kind, 0, 0, control))

    def closed_error(self, peer: Peer) -> Exception:
        if peer.lost is not None:
            return peer.lost_error()
        return NotInitialized(
            f"worker {self.info.name!r} is shutting down; the call to {peer.name!r} was not made"
        )

    def connect(self, peer: Peer, deadline_s: float | None = None) -> Link:
        """Returns the link to ``peer``, made now if there is none. Blocks for a limited time.

        Args:
            peer: The other worker.
            deadline_s: When to give up on one that listens and does not speak, by
                ``time.monotonic``; None for the default time of a call from now.

        Raises:
            WorkerLost: Nobody answers.
            CallTimeout: It did not speak in time; it may be busy or stopped, and is not lost.
            NotInitialized: This worker has shut down.
        """
        self.check_open()
        began_s = monotonic()
        if deadline_s is None:
            deadline_s = began_s + self.default_timeout_s
        try:
            return self._connector.connect(peer, deadline_s)
        except Speechless as error:
            self.check_open()
            elapsed_s = monotonic() - began_s
            raise CallTimeout(
                f"no connection to worker {peer.name!r} within {elapsed_s:.1f} s: it is busy or "
                f"stopped, or the network is slow ({error})",
                worker=peer.name,
                elapsed_s=elapsed_s,
            ) from error
        except Unreachable as error:
            self.lose(peer, str(error))
            self.check_open()
            raise peer.lost_error() from error

    def connect_all(
        self, peers: Iterable[Peer], on_lost: Callable[[Peer], None] = lambda peer: None
    ) -> None:
        """Connects to all, so that the death of each is noticed; those that are busy come last.

        Blocks until all have spoken, or are lost: then ``on_lost`` is called.
        """
        waiting = deque(peer for peer in peers if not peer.is_self)
        while waiting:
            peer = waiting.popleft()
            try:
                self.connect(peer, monotonic() + self._connector.timeout_s)
            except CallTimeout:
                waiting.append(peer)
            except WorkerLost:
                on_lost(peer)
            except NotInitialized:
                return

    def check_open(self) -> None:
        if self._is_closed:
            raise NotInitialized(
                f"worker {self.info.name!r} has shut down; call init_rpc to join a group again"
            )

    # Receiving

    def read(
        self,
        peer: Peer,
        link: Link,
        *,
        may_block: bool,
        awaited: PendingCall | None = None,
        spinning: Spinning | None = None,
    ) -> bool:
        """Receives, and handles what is complete; returns whether there was anything.

        Args:
            peer: Who sent it.
            link: The connection, whose ``reading`` this thread has.
            may_block: Whether to wait for a moment if nothing is there.
            awaited: The call that this thread waits for, whose answer it takes itself.
            spinning: How long to look for data without blocking.
        """
        try:
            if spinning is None:
                frames = link.receive(may_block=may_block)
            else:
                frames = link.receive_spinning(spinning)
            for frame in frames:
                self._dispatch(peer, frame, awaited)
            return bool(frames)
        except LinkClosed as error:
            self.lose(peer, str(error))
        except ProtocolError as error:
            self.turn_away(peer, error)
        except MemoryError:
            self.lose(peer, "there is no memory for a message of it")
        return False

    def turn_away(self, peer: Peer, error: ProtocolError) -> None:
        """Declares a worker lost that sent what no worker sends."""
        _log.error("closing the connection to worker %r: %s", peer.name, error)
        self.lose(peer, f"it sent what no worker sends: {error}")

    def _dispatch(self, peer: Peer, frame: Frame, awaited: PendingCall | None) -> None:
        if frame.kind == _REPLY:
            if not self.calls.take_reply(frame, awaited):
                self.reactor.urgent.append((self.discard, peer, frame))
            return
        route = self._routes.get(frame.kind)
        if route is None:
            raise ProtocolError(f"message kind {frame.kind} is unknown")
        handler, is_inline, take_up = route
        if not is_inline:
            if take_up is None:
                self.reactor.tasks.append((handler, peer, frame), peer.id)
                return
            call = take_up(peer, frame, monotonic())
            if not self.reactor.tasks.offer((handler, peer, call), peer.id, _size(frame)):
                self.reactor.urgent.append((self._refuse, peer, call))
            return
        try:
            handler(peer, frame)
        except ProtocolError:
            raise
        except BaseException:
            log_mishap("a message of worker %r could not be handled", peer.name)

    def deliver(self, peer: Peer, frame: Frame) -> None:
        """Handles a frame from this worker to itself, which touches no socket."""
        reactor = self.reactor
        had_waiting = len(reactor.tasks) + len(reactor.urgent)
        self._dispatch(peer, frame, None)
        if len(reactor.tasks) + len(reactor.urgent) > had_waiting:
            reactor.wake()

    discard: Handler = staticmethod(lambda peer, frame: None)
    """Called with replies that nobody waits for any more; a layer above may replace it."""

    def _on_pulled(self, peer: Peer, frame: Frame) -> None:
        peer.held.release(int.from_bytes(frame.control[:8], "little"))

    def _on_verdict(self, peer: Peer, frame: Frame) -> None:
        peer.channels.confirm(verdict_in(frame.control))

    # Loss and leaving

    def lose(self, peer: Peer, cause: str) -> None:
        """Declares a worker lost: calls to it fail at once, then ``when_lost`` runs as a task."""
        is_news = not (self._is_closed or self.is_leaving) and peer.declare_lost(cause) is not None
        # Only now: the end of the connection would be taken for the cause.
        link = peer.link
        if link is not None:
            self.contacts.forget(peer)
            self.links.end(link)
        if self.is_leaving and not self._is_closed:
            self._submit(self._when_disconnected, peer)
        if not is_news:
            return
        self.calls.fail_of_worker(peer)
        self._submit(self._when_lost, peer)

    def _submit(self, callback: PeerCallback, peer: Peer) -> None:
        self.reactor.submit(lambda told, _: callback(told), peer)

    def abandon(self) -> None:
        """Frees the descriptors of all connections, in a forked process; takes no lock."""
        for listener in self._listeners:
            listener.close()
        self.links.abandon()

    def close(self, limit_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Leaves at once: ends connections and threads. What still waits gets an error.

        Threads that run user code which does not return are left behind, with a warning.

        Args:
            limit_s: How long to wait for what is still to be written, and for threads.
        """
        end_s = monotonic() + limit_s
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.answers.write_held()
        self.links.say_goodbye(limit_s)
        if self.housekeeper is not None:
            self.housekeeper.close()
        gone = NotInitialized(f"worker {self.info.name!r} shut down before the answer came")
        self.calls.fail_all(gone)
        self._acceptor.close()
        self._connector.close()
        stuck = self.reactor.close(max(end_s - monotonic(), _LEAST_CLOSE_S))
        if stuck:
            _log.warning("threads still running user code at shutdown: %s", ", ".join(stuck))
        for listener in self._listeners:
            listener.close()
        self.links.close(is_in_use=bool(stuck))
        for peer in list(self.peers.values()):
            peer.held.close()
        self._switches.close()


def _size(frame: Frame) -> int:
    """Returns the bytes that a waiting frame takes."""
    if not frame.buffers:
        return len(frame.control)
    return len(frame.control) + sum([len(buffer) for buffer in frame.buffers])
