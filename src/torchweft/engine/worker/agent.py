"""The agent: one worker's end of all connections, calls and threads.

The agent creates its parts and connects them. It does not know functions, gradients or references:
the layers above register a handler for each kind of message with ``Agent.receiver``.

Its slots hold the objects of those layers. Each worker has one autograd engine, one object for its
calls, one lock for its optimizers. Functions that programs and other workers call must find these
objects from the current agent. The agent is below those layers and cannot name their types. So the
module that defines such an object also makes its key, a ``Slot`` of its type.
"""

from __future__ import annotations

import functools
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from torchweft import knobs
from torchweft.engine.channels.channel import Home
from torchweft.engine.channels.channels import Channels
from torchweft.engine.channels.device_copies import PageLocks
from torchweft.engine.channels.memory import BufferPool, Copier
from torchweft.engine.io.link import Link
from torchweft.engine.protocol.calls import SimpleRequest
from torchweft.engine.protocol.connecting import (
    Failure,
    HandshakeTimeout,
    Patience,
    Unreachable,
    failure_of,
)
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import ServedStreams
from torchweft.engine.threads.reactor import OWN, FairQueue, Reactor
from torchweft.engine.threads.reports import Events
from torchweft.engine.threads.timers import Timers, look_after
from torchweft.engine.wire.frames import Buffer, Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import OpenCalls, PendingCall, Waiter
from torchweft.engine.worker.connecting import Acceptor, Connector, verdict_in
from torchweft.engine.worker.connections import Links, Traffic, sum_of
from torchweft.engine.worker.peers import Members, Peer
from torchweft.engine.worker.process import ShortSwitches
from torchweft.engine.worker.receiving import Receiver
from torchweft.engine.worker.sending import Lifetime, Sender
from torchweft.errors import CallTimeout, DuplicateName, NotInitialized, WeftError, WorkerLost
from torchweft.secret import Secret, key_of_observers

if TYPE_CHECKING:
    from torchweft.engine.io.secure import TlsOptions

T = TypeVar("T")
_log = logging.getLogger("torchweft")

PeerCallback = Callable[[Peer], None]
_CLOSE_TIMEOUT_S = 5.0
_LEAST_CLOSE_S = 0.5
_MOST_UNUSED = 16
"""How many workers without a connection are taken to be there, in an open group."""
_LOOK_LIMIT_S = 2.0
_CLAIM_LIMIT_S = 0.25
"""How long a worker is asked whose name or rank is claimed; less than the newcomer waits."""


class Protection(NamedTuple):
    """How peers are authenticated, and how connections are protected.

    Attributes:
        key: The key of this run, which peers must have.
        has_secret: Whether the key was made with a secret of the group; if not, every reader of
            the rendezvous store has the key.
        tls: How TCP connections are secured; None for no TLS.
        observers_key: The key of observers, which are no workers.
    """

    key: Secret
    has_secret: bool = False
    tls: TlsOptions | None = None
    observers_key: Secret = key_of_observers(None)

    @classmethod
    def of_run(
        cls, token: str, secret: Secret | None = None, tls: TlsOptions | None = None
    ) -> Protection:
        """Returns the protection for the run with a token; its key uses the secret, if any."""
        key = Secret(token.encode()) if secret is None else secret.derive(token)
        return cls(key, secret is not None, tls, key_of_observers(secret))


class Slot(Generic[T]):
    """The key of a worker's object of type ``T``; a constant of the module of ``T``.

    Args:
        make: Makes the object on first access; None if ``rpc.node`` makes it.
    """

    def __init__(self, make: Callable[[], T] | None = None) -> None:
        self.make = make


class Slots(dict[Slot[Any], Any]):
    """The objects of one worker. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    if TYPE_CHECKING:
        # Every call makes a lookup, so it stays that of ``dict``; only its type is declared here.
        def __getitem__(self, slot: Slot[T]) -> T: ...
        def __setitem__(self, slot: Slot[T], value: T) -> None: ...

    def __missing__(self, slot: Slot[T]) -> T:
        if slot.make is None:
            raise KeyError(slot)
        with self._lock:
            if slot not in self:
                self[slot] = slot.make()
            return self[slot]


class Agent:
    """One worker's end of all connections, calls and threads.

    Args:
        protection: How peers are authenticated and connections protected.
        members: The group.
        listeners: Listening sockets whose addresses the other workers have; owned from here on.
        worker_threads: How many tasks run at a time.
        default_timeout_s: Default timeout of calls, in seconds; may be infinite.
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
        self.find, self.peers_by_name = members.find, members.by_name
        self.me = members.me
        self.info = self.me.info
        self.pool = BufferPool(knobs.POOL_LIMIT_BYTES.get())
        self.page_locks = PageLocks(knobs.PINNED_LIMIT_BYTES.get())
        self.default_timeout_s = default_timeout_s
        self.slots = Slots()
        self.served_streams = ServedStreams()
        """The streams on which the GPU work of tasks runs."""
        self.events = Events()
        self.lifetime = Lifetime(self.info.name)
        self._watchers: list[PeerCallback] = []
        self.when_lost: PeerCallback = self.tell_watchers
        """Run as a task when a worker is lost: tells the parts and, last of all, the watchers."""
        self.when_disconnected: PeerCallback = lambda peer: None
        """Run as a task when a connection ends while the group is leaving."""
        self._listeners = listeners
        self._lock = threading.RLock()
        self._switches = ShortSwitches()
        limits = knobs.QUEUE_LIMIT_CALLS.get(), knobs.QUEUE_LIMIT_BYTES.get()
        tasks = FairQueue(*limits, kept=frozenset({OWN, self.me.id}))
        self.timers = Timers(f"weft-{self.info.name}-clock")
        self.reactor = Reactor(f"weft-{self.info.name}", worker_threads, tasks)
        if device_streams.HAS_CUDA:
            self.reactor.before_task = self.served_streams.begin
            self.reactor.after_task = self.served_streams.end
        self.receiver = Receiver(self.reactor, self.lose)
        self.sender = Sender(
            self.reactor, self.lifetime, self.receiver, self.connect, self._cannot_write
        )
        self.waiter = Waiter(self.reactor)
        self.calls = OpenCalls(
            self.peers, self.reactor, self.timers, self.sender, self.receiver, self.waiter
        )
        if patience is None:
            patience = Patience(knobs.DETECTION_S.get(), knobs.RECONNECT_S.get())
        self.links = Links(self.reactor, self.timers, self.receiver, self.pool, patience, self.lose)
        look_after(self.reactor, self.timers, self.calls.__len__, self.links.mend)
        self.channels = Channels(self._home(patience))
        self._connector = Connector(
            self.me.registration,
            members.is_open,
            protection.key,
            self.channels,
            self.links,
            protection.tls,
            has_secret=protection.has_secret,
        )
        self.links.redial = self._connector.redial
        self._acceptor = Acceptor(
            self._connector,
            self._lookup,
            functools.partial(self.reactor.submit, self._greet),
            self.sender.connect_soon,
            protection.observers_key,
        )
        self.receiver.on(Kind.VERDICT, _on_verdict, inline=True)

    def _home(self, patience: Patience) -> Home:
        """Returns what channels need of this worker."""
        on, post = self.receiver.on, self.sender.post
        return Home(
            name=self.info.name,
            reactor=self.reactor,
            pool=self.pool,
            page_locks=self.page_locks,
            copier=Copier(f"weft-{self.info.name}-copy"),
            idle_s=knobs.POOL_IDLE_S.get(),
            detection_s=patience.detection_s,
            peers=self.peers,
            post=lambda peer, kind, control: post(peer, encode_frame(kind, 0, 0, control)),
            on=lambda kind, handler: on(
                kind, lambda peer, frame: handler(peer, frame.control), inline=True
            ),
            dial=lambda peer, count, number: self._connector.dial_data(peer, count, number),
            lose=self.lose,
            check_open=self.lifetime.check_open,
        )

    def ask_again(self, peer: Peer, request: bytes, reason: Exception) -> Sequence[Buffer]:
        """Has a peer send buffers behind their message that did not arrive. Blocks.

        Raises:
            WorkerLost: The sender was lost before the buffers came.
        """
        call = PendingCall(peer.id, peer.name, "resend of tensors", math.inf)
        ask = SimpleRequest(lambda number: encode_frame(Kind.SUPPLY, 0, number, request))
        self.calls.ask_and_wait(peer, call, ask)
        if call.error is not None:
            raise call.error from reason
        assert call.frame is not None
        return call.frame.buffers

    # Setting up

    def on_lost(self, callback: PeerCallback) -> None:
        """Has ``callback`` run as a separate task once the parts have handled a lost worker."""
        self._watchers.append(callback)

    def off_lost(self, callback: PeerCallback) -> None:
        """Unregisters a callback of ``on_lost``."""
        if callback in self._watchers:
            self._watchers.remove(callback)

    def tell_watchers(self, peer: Peer) -> None:
        """Schedules the callbacks of ``on_lost``; does not wait for them."""
        for callback in list(self._watchers):
            self._submit(callback, peer)

    def answer_observers(self, answer: Callable[[str], bytes] | None) -> None:
        """Has ``answer`` make the answers to questions of observers; None to refuse them."""
        self._acceptor.answer = answer

    def start(self) -> None:
        """Starts to accept connections; all handlers must be registered by now."""
        self.timers.start()
        for listener in self._listeners:
            listener.setblocking(False)
            self.reactor.watch_reading(
                listener.fileno(), functools.partial(self._on_connection, listener)
            )

    # Peers

    def traffic(self) -> Traffic:
        """Returns the bytes exchanged with all other workers so far."""
        over = self.channels
        off_links = Traffic(over.offered_bytes, over.pulled_bytes, over.lent_bytes)
        return sum_of([self.links.traffic(), off_links])

    def _on_connection(self, listener: socket.socket) -> None:
        try:
            self._acceptor.accept(listener)
        finally:
            self.reactor.resume_reading(listener.fileno())

    def _greet(self, connection: socket.socket, _: object) -> None:
        with self.reactor.idling():
            self._acceptor.greet(connection)

    def _lookup(self, worker: int, registration: Registration | None) -> Peer | None:
        if registration is not None and registration.id == worker:
            self.take_up(registration)
        peer = self.peers.get(worker)
        return None if peer is self.me else peer

    def take_up(self, registration: Registration, *, is_introduced: bool = True) -> Peer:
        """Adds a worker of an open group, and declares former ones of its name or rank lost.

        Its word alone ends nobody: former ones are asked first, which may take some time.

        Raises:
            DuplicateName: A former one lives.
            ProtocolError: The group is closed.
        """
        for former in self.members.claimed(registration):
            if self._lives(former):
                raise DuplicateName(f"worker {former.name!r} (rank {former.info.id}) lives")
        peer, others = self.members.join(registration, is_introduced=is_introduced)
        for former in others:
            self.lose(former, f"worker {peer.name!r} (rank {peer.info.id}) has taken its place")
        if is_introduced:
            self._look_at_one()
        return peer

    def _lives(self, peer: Peer) -> bool:
        """Whether a worker lives whose name or rank another one claims. Blocks for a moment.

        One that accepts a connection and does not answer in time may be busy or stopped. With a
        link to it, it is known to be there; without one, the newcomer is believed.
        """
        try:
            self._connector.introduce(peer, _CLAIM_LIMIT_S)
        except DuplicateName:
            return True
        except (OSError, WeftError) as error:
            return failure_of(error) is Failure.BUSY and peer.is_linked
        return True

    def _look_at_one(self) -> None:
        """Looks whether one of many workers without a connection is there, the least recent.

        One that died before it was called would be kept for ever: no connection of it ends. One
        look for each that comes is enough.
        """
        unused = [peer for peer in self.members.known() if peer.link is None and not peer.is_over]
        if len(unused) > _MOST_UNUSED:
            peer = min(unused, key=lambda each: each.looked_s)
            peer.looked_s = monotonic()
            if not peer.is_self:
                self.reactor.submit(self._look_at, peer)

    def _look_at(self, peer: Peer, _: object) -> None:
        with self.reactor.idling():
            try:
                self._connector.introduce(peer, _LOOK_LIMIT_S)
            except (OSError, WeftError) as error:
                if failure_of(error) is Failure.GONE:
                    self.lose(peer, str(error))

    def introduce(self, peer: Peer, timeout_s: float) -> None:
        """Introduces this worker to another one of an open group; see ``Connector.introduce``."""
        self._connector.introduce(peer, timeout_s)

    # Connecting

    def connect(self, peer: Peer, deadline_s: float | None = None) -> Link:
        """Returns the link to ``peer``, dialled now if needed. Blocks for a limited time.

        Args:
            peer: The other worker.
            deadline_s: When to give up on a peer that accepts but does not answer, by
                ``time.monotonic``; None for the default call timeout from now.

        Raises:
            WorkerLost: The peer is lost, or cannot be reached.
            CallTimeout: The peer did not answer in time. It may be busy or stopped; it is not lost.
            NotInitialized: This worker has shut down.
        """
        self.lifetime.check_open()
        began_s = monotonic()
        if deadline_s is None:
            deadline_s = began_s + self.default_timeout_s
        try:
            return self._connector.connect(peer, deadline_s)
        except HandshakeTimeout as error:
            self.lifetime.check_open()
            elapsed_s = monotonic() - began_s
            raise CallTimeout(
                f"no connection to worker {peer.name!r} within {elapsed_s:.1f} s: it is busy or "
                f"stopped, or the network is slow ({error})",
                worker=peer.name,
                elapsed_s=elapsed_s,
            ) from error
        except Unreachable as error:
            self.lose(peer, str(error))
            self.lifetime.check_open()
            raise peer.lost_error() from error

    def connect_all(
        self, peers: Iterable[Peer], on_lost: Callable[[Peer], None] = lambda peer: None
    ) -> None:
        """Connects to all ``peers``, so that the death of each is noticed; busy peers come last.

        Blocks until each peer has answered or is lost. Calls ``on_lost`` for each lost peer.
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

    # Loss and leaving

    def _cannot_write(self, peer: Peer, cause: str) -> None:
        """Declares a worker lost to which nothing can be written, after what it has said last."""
        if peer.link is not None:
            self.receiver.hear_last(peer, peer.link)
        self.lose(peer, cause)

    def lose(self, peer: Peer, cause: str) -> None:
        """Declares a worker lost: calls to it fail at once, then ``when_lost`` runs as a task."""
        own = self.lifetime
        is_news = not (own.is_closed or own.is_leaving) and peer.declare_lost(cause) is not None
        # Last: otherwise the end of the connection would be recorded as the cause.
        self._end_link(peer)
        if own.is_leaving and not own.is_closed:
            self._submit(self.when_disconnected, peer)
        if not is_news:
            return
        self.events.note("worker %r is lost: %s", peer.name, cause)
        self.members.lose(peer)
        self.calls.fail_of_worker(peer)
        self._submit(self.when_lost, peer)

    def leave_behind(self, peer: Peer, cause: str) -> None:
        """Marks a worker lost while leaving: no part is told, no message of it is awaited."""
        peer.declare_lost(cause)
        self._end_link(peer)

    def _end_link(self, peer: Peer) -> None:
        link = peer.link
        if link is not None:
            self.links.forget(peer)
            self.links.end(link)

    def _submit(self, callback: PeerCallback, peer: Peer) -> None:
        self.reactor.submit(lambda told, _: callback(told), peer)

    def abandon(self) -> None:
        """Frees the descriptors of all connections, in a forked process; takes no lock."""
        for listener in self._listeners:
            listener.close()
        self.links.abandon()
        self.channels.abandon()
        self.timers.abandon()
        self.reactor.abandon()

    def close(self, limit_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Shuts down at once: ends connections and threads. Open calls fail with an error.

        Functions that run here for others are told so by ``is_cancelled``. Threads that run user
        code which does not return are left behind, with a warning.

        Args:
            limit_s: Seconds to wait for unwritten data and for threads.
        """
        end_s = monotonic() + limit_s
        with self._lock:
            if self.lifetime.is_closed:
                return
            self.lifetime.is_closed = True
        self.sender.write_held()
        self.links.say_goodbye(limit_s)
        self.timers.close()
        gone = NotInitialized(f"worker {self.info.name!r} shut down before the answer came")
        self.calls.fail_all(gone)
        for peer in list(self.peers.values()):
            self.calls.caller_lost(peer)
        self._acceptor.close()
        self._connector.close()
        stuck = self.reactor.close(max(end_s - monotonic(), _LEAST_CLOSE_S))
        if stuck:
            _log.warning("threads still running user code at shutdown: %s", ", ".join(stuck))
        for listener in self._listeners:
            listener.close()
        self.links.close(is_in_use=bool(stuck))
        self.channels.close(0.0)
        for peer in list(self.peers.values()):
            peer.held.close()
        self._switches.close()


def _on_verdict(peer: Peer, frame: Frame) -> None:
    peer.ways.confirm(verdict_in(frame.control))
