"""The other workers as one worker sees them: how to reach each, and whether it is still there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Callable

from weft import knobs
from weft.agent.shared_memory import MemoryExchange, close_all, map_memory
from weft.channel.capabilities import Capabilities
from weft.channel.choice import Channels, choose
from weft.channel.sending import HeldTensors
from weft.errors import ConfigurationError, ProtocolError, WorkerLost
from weft.protocol.membership import Registration
from weft.transport import addresses
from weft.transport.handshake import Greeting, receive_greeting, send_greeting
from weft.transport.link import Link, LinkClosed
from weft.wire.messages import Kind

_CROSSED = "crossed"
_PURPOSE = "purpose"
_DATA = "data"


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
        self.channels = Channels(self.name, 0)
        self.held = HeldTensors()
        self.link: Link | None = None
        self.lost: WorkerLost | None = None
        # Of use once there is somebody who takes data connections, and, to dial them, a link.
        self.accept_data: Callable[[socket.socket], None] | None = None
        self.dial_data: Callable[[int], list[socket.socket]] | None = None
        self.reach_data: Callable[[], bool] = lambda: False
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
        self.memory = MemoryExchange()
        self._capabilities = dataclasses.replace(capabilities, memory_nonce=self.memory.nonce)
        self._timeout_s = timeout_s
        self._make_link = make_link
        self._adopt = adopt
        self._uses_unix = bool(knobs.UNIX_SOCKETS.get())
        self._lock = threading.Lock()
        self._greeting_now: set[socket.socket] = set()
        self._is_closed = False

    def close(self) -> None:
        """Turns away who has connected and not said yet who it is, and whoever still comes."""
        self.memory.close()
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
        memory: list[int] = []
        try:
            send_greeting(connection, Kind.HELLO, self._greeting())
            answer = receive_greeting(
                connection, Kind.WELCOME, self._token, self._timeout_s, memory
            )
            if not answer.refusal:
                theirs = self._choose_channels(peer, connection, answer)
                map_memory(peer.channels, memory, theirs.memory_nonce)
                peer.channels.confirm(answer.facts.get("verdict"))
                with self.memory.descriptor_for(connection) as descriptor:
                    self._send_verdict(peer, connection, descriptor)
                return self._install(peer, connection)
        except BaseException:
            connection.close()
            raise
        finally:
            close_all(memory)
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
                address = addresses.parse(text)
                if self._uses_unix or not isinstance(address, addresses.UnixAddress):
                    return addresses.dial(address, self._timeout_s)
            except (OSError, ConfigurationError) as error:
                errors.append(f"{text}: {getattr(error, 'strerror', None) or error}")
        raise ConnectionRefusedError(
            "; ".join(errors) or "it listens nowhere that this side reaches"
        )

    def _dial_data(self, peer: Peer, count: int) -> list[socket.socket]:
        """Makes data connections to a peer; raises OSError or ProtocolError where it cannot."""
        connections: list[socket.socket] = []
        try:
            hello = Greeting(self._worker, self._token, facts={_PURPOSE: _DATA})
            for _ in range(count):
                connections.append(self._open(peer))
                send_greeting(connections[-1], Kind.HELLO, hello)
            for connection in connections:
                answer = receive_greeting(connection, Kind.WELCOME, self._token, self._timeout_s)
                if answer.refusal:
                    raise ConnectionRefusedError(f"turned away: {answer.refusal}")
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        return connections

    def accept(self, connection: socket.socket, peers: list[Peer]) -> None:
        """Greets whoever has connected, and takes the connection if it is of the group."""
        try:
            addresses.tune(connection)
            greeting = self._receive(connection, Kind.HELLO)
            if not 0 <= greeting.worker < len(peers) or greeting.worker == self._worker:
                raise ProtocolError(f"there is no other worker of rank {greeting.worker}")
        except Exception:
            connection.close()  # A stranger learns nothing, not even why.
            return
        peer = peers[greeting.worker]
        if greeting.facts.get(_PURPOSE) == _DATA:
            self._accept_data(connection, peer)
            return
        refusal = self._refusal(peer)
        try:
            if refusal:
                send_greeting(connection, Kind.WELCOME, self._greeting(refusal=refusal))
                connection.close()
                return
            theirs = self._choose_channels(peer, connection, greeting)
            welcome = self._greeting(verdict=peer.channels.verdict())
            with self.memory.descriptor_for(connection) as descriptor:
                send_greeting(connection, Kind.WELCOME, welcome, descriptor)
            if theirs.memory_nonce and connection.family == socket.AF_UNIX:
                self._receive_memory(peer, connection, theirs)
            self._install(peer, connection)
        except (OSError, ProtocolError):
            connection.close()
            peer.is_accepting = False

    def _receive_memory(self, peer: Peer, connection: socket.socket, theirs: Capabilities) -> None:
        """Takes the dialler's memory, which comes with its verdict, and tells it the own one.

        A verdict without memory comes over the link, for which there is a handler.
        """
        memory: list[int] = []
        try:
            answer = self._receive(connection, Kind.VERDICT, memory)
            map_memory(peer.channels, memory, theirs.memory_nonce)
        finally:
            close_all(memory)
        peer.channels.confirm(answer.facts.get("verdict"))
        self._send_verdict(peer, connection)

    def _send_verdict(
        self, peer: Peer, connection: socket.socket, descriptor: int | None = None
    ) -> None:
        verdict = self._greeting(verdict=peer.channels.verdict())
        send_greeting(connection, Kind.VERDICT, verdict, descriptor)

    def _accept_data(self, connection: socket.socket, peer: Peer) -> None:
        refusal = ""
        if peer.lost is not None:
            refusal = f"this group lost worker {peer.name!r} before"
        elif peer.accept_data is None:
            refusal = "this worker takes no data connections"
        try:
            welcome = Greeting(self._worker, self._token, refusal)
            send_greeting(connection, Kind.WELCOME, welcome)
            if refusal or peer.accept_data is None:
                connection.close()
            else:
                peer.accept_data(connection)
        except OSError:
            connection.close()

    def _greeting(self, refusal: str = "", verdict: dict[str, str] | None = None) -> Greeting:
        facts = {"capabilities": self._capabilities.as_json(), "verdict": verdict}
        return Greeting(self._worker, self._token, refusal, {} if refusal else facts)

    def _choose_channels(
        self, peer: Peer, connection: socket.socket, greeting: Greeting
    ) -> Capabilities:
        theirs = Capabilities.from_json(greeting.facts.get("capabilities"))
        peer.channels = choose(self._capabilities, theirs, f"worker {peer.name!r}")
        self.memory.lend(peer.channels, connection)
        return theirs

    def _receive(
        self, connection: socket.socket, kind: Kind, descriptors: list[int] | None = None
    ) -> Greeting:
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("this worker has shut down")
            self._greeting_now.add(connection)
        try:
            return receive_greeting(connection, kind, self._token, self._timeout_s, descriptors)
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
        peer.dial_data = functools.partial(self._dial_data, peer)
        with peer.state_lock:
            peer.link = link
            peer.is_accepting = False
        self._adopt(peer, link)
        peer.linked.set()
        return link


def _where(peer: Peer) -> str:
    return f"worker {peer.name!r} at {', '.join(peer.registration.addresses) or 'no address'}"
