"""The other workers as one worker sees them: how to reach each, and whether it is still there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from weft.channel.choice import Capabilities, Channels, choose
from weft.channel.sending import HeldTensors
from weft.errors import ConfigurationError, ProtocolError, WorkerLost
from weft.protocol.membership import Registration
from weft.transport import addresses
from weft.transport.handshake import Greeting, receive_greeting, send_greeting
from weft.transport.link import Link, LinkClosed
from weft.wire.messages import Kind

_CROSSED = "crossed"


class Unreachable(ConnectionError):
    """Nobody answers where a peer said it listens; the agent declares the peer lost."""


class Peer:
    """One worker of the group, seen from another (or from itself).

    A connection is made when it is first needed, by whoever needs it. If both sides dial at
    once, the connection dialled by the higher rank stays: the acceptor turns the other one away
    with the answer ``crossed``, and its dialler waits for the one that stays.

    Args:
        registration: What the peer said of itself when it joined.
        main_by_name: Whether both run the same main program, so that its functions go by name.
    """

    def __init__(self, registration: Registration, *, main_by_name: bool, is_self: bool) -> None:
        self.registration = registration
        self.info = registration.info
        self.id = registration.id
        self.name = registration.name
        self.main_by_name = main_by_name
        self.is_self = is_self
        # Both are of use once there is a connection.
        self.channels = Channels(self.name, 0, "there is no connection")
        self.held = HeldTensors()
        self.link: Link | None = None
        self.lost: WorkerLost | None = None
        self.is_dialling = False
        self.is_accepting = False
        self.state_lock = threading.Lock()
        self.dial_lock = threading.Lock()
        self.linked = threading.Event()

    def declare_lost(self, cause: str) -> WorkerLost | None:
        """Marks the peer as lost; returns the error for those who wait, None if it was already."""
        with self.state_lock:
            if self.lost is not None:
                return None
            since = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            self.lost = WorkerLost(
                f"worker {self.name!r} (rank {self.id}) is lost since {clock}: {cause}",
                worker=self.name,
                since=since,
                cause=cause,
            )
            self.linked.set()
            return self.lost

    def lost_error(self) -> WorkerLost:
        """Returns a fresh copy of the error, so that tracebacks of many raisers do not mix."""
        lost = self.lost
        assert lost is not None
        return type(lost)(str(lost), worker=lost.worker, since=lost.since, cause=lost.cause)


class Connector:
    """Makes and accepts the connections of one worker.

    Args:
        worker: Rank of this worker.
        token: Secret of this run, which both sides must know.
        capabilities: What this side's channels can do.
        timeout_s: Bound for one connection attempt, in seconds.
        make_link: Wraps a connected socket.
        adopt: Called with a peer and its new link, to start reading it.
    """

    def __init__(
        self,
        worker: int,
        token: str,
        capabilities: Capabilities,
        timeout_s: float,
        make_link: Callable[[socket.socket, Peer], Link],
        adopt: Callable[[Peer, Link], None],
    ) -> None:
        self._worker = worker
        self._token = token
        self._capabilities = capabilities
        self._timeout_s = timeout_s
        self._make_link = make_link
        self._adopt = adopt
        self._lock = threading.Lock()
        self._greeting_now: set[socket.socket] = set()
        self._is_closed = False

    def close(self) -> None:
        """Turns away who has connected and not said yet who it is, and whoever still comes."""
        with self._lock:
            self._is_closed = True
            for connection in self._greeting_now:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def connect(self, peer: Peer) -> Link:
        """Returns the link to ``peer``, dialling it if there is none. Blocks at most the timeout.

        Raises:
            WorkerLost: The peer is lost, or nobody answers where it said it listens.
        """
        with peer.dial_lock:
            with peer.state_lock:
                if peer.link is not None:
                    return peer.link
                if peer.lost is not None:
                    raise peer.lost_error()
                peer.is_dialling = not peer.is_accepting
            try:
                return self._dial(peer) if peer.is_dialling else self._await_link(peer)
            except (OSError, ProtocolError, LinkClosed) as error:
                if peer.lost is not None:
                    raise peer.lost_error() from error
                raise Unreachable(f"no connection to {_where(peer)}: {error}") from error
            finally:
                peer.is_dialling = False

    def _dial(self, peer: Peer) -> Link:
        connection = self._open(peer)
        try:
            send_greeting(connection, Kind.HELLO, self._greeting())
            answer = receive_greeting(connection, Kind.WELCOME, self._token, self._timeout_s)
            if not answer.refusal:
                self._choose_channels(peer, answer)
                peer.channels.confirm(answer.facts.get("verdict"))
                # Read by a handler of the acceptor, once it reads the link.
                verdict = self._greeting(verdict=peer.channels.verdict())
                send_greeting(connection, Kind.VERDICT, verdict)
                return self._install(peer, connection)
        except BaseException:
            connection.close()
            raise
        connection.close()
        if answer.refusal == _CROSSED:
            return self._await_link(peer)
        raise ConnectionRefusedError(f"turned away: {answer.refusal}")

    def _await_link(self, peer: Peer) -> Link:
        """Waits for the connection that the other side is making."""
        if peer.linked.wait(self._timeout_s) and peer.link is not None:
            return peer.link
        raise ConnectionRefusedError("the connection that it was making itself never came")

    def _open(self, peer: Peer) -> socket.socket:
        errors = []
        for text in peer.registration.addresses:
            try:
                return addresses.dial(addresses.parse(text), self._timeout_s)
            except (OSError, ConfigurationError) as error:
                errors.append(f"{text}: {getattr(error, 'strerror', None) or error}")
        raise ConnectionRefusedError(
            "; ".join(errors) or "it listens nowhere that this side reaches"
        )

    def accept(self, connection: socket.socket, peers: list[Peer]) -> None:
        """Greets whoever has connected, and takes the connection if it is of the group."""
        try:
            greeting = self._receive_hello(connection)
            if not 0 <= greeting.worker < len(peers) or greeting.worker == self._worker:
                raise ProtocolError(f"there is no other worker of rank {greeting.worker}")
        except Exception:
            connection.close()  # A stranger learns nothing, not even why.
            return
        peer = peers[greeting.worker]
        refusal = self._refusal(peer)
        try:
            if refusal:
                send_greeting(connection, Kind.WELCOME, self._greeting(refusal=refusal))
                connection.close()
                return
            self._choose_channels(peer, greeting)
            welcome = self._greeting(verdict=peer.channels.verdict())
            send_greeting(connection, Kind.WELCOME, welcome)
            self._install(peer, connection)
        except (OSError, ProtocolError):
            connection.close()
            peer.is_accepting = False

    def _greeting(self, refusal: str = "", verdict: dict[str, str] | None = None) -> Greeting:
        facts = {"capabilities": self._capabilities.as_json(), "verdict": verdict}
        return Greeting(self._worker, self._token, refusal, {} if refusal else facts)

    def _choose_channels(self, peer: Peer, greeting: Greeting) -> None:
        theirs = Capabilities.from_json(greeting.facts.get("capabilities"))
        peer.channels = choose(self._capabilities, theirs, f"worker {peer.name!r}")

    def _receive_hello(self, connection: socket.socket) -> Greeting:
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("this worker has shut down")
            self._greeting_now.add(connection)
        try:
            return receive_greeting(connection, Kind.HELLO, self._token, self._timeout_s)
        finally:
            with self._lock:
                self._greeting_now.discard(connection)

    def _refusal(self, peer: Peer) -> str:
        with peer.state_lock:
            if peer.lost is not None:
                return f"this group lost worker {peer.name!r} before"
            if peer.link is not None or (peer.is_dialling and self._worker > peer.id):
                return _CROSSED
            peer.is_accepting = True
            return ""

    def _install(self, peer: Peer, connection: socket.socket) -> Link:
        link = self._make_link(connection, peer)
        with peer.state_lock:
            peer.link = link
            peer.is_accepting = False
        self._adopt(peer, link)
        peer.linked.set()
        return link


def _where(peer: Peer) -> str:
    return f"worker {peer.name!r} at {', '.join(peer.registration.addresses) or 'no address'}"
