"""Makes and accepts the connections of one worker, after both sides have proved who they are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from weft import knobs
from weft.agent.peers import Peer, Unreachable
from weft.agent.shared_memory import MemoryExchange, close_all, map_memory
from weft.channel.capabilities import Capabilities
from weft.channel.choice import choose
from weft.errors import ConfigurationError, DuplicateName, ProtocolError
from weft.protocol.membership import Registration
from weft.transport import addresses
from weft.transport.handshake import Greeting, receive_greeting, send_greeting
from weft.transport.link import Link, LinkClosed
from weft.wire.messages import Kind

_CROSSED = "crossed"
_PURPOSE = "purpose"
_DATA = "data"
_INTRODUCTION = "introduction"
_REGISTRATION = "registration"
_TO = "to"
_TAKEN = "taken"
HOST = "host"
"""In the facts of a registration: the name of the host, for messages."""


class Lookup(Protocol):
    """Returns the worker of an id; None where there is no other of that id.

    In an open group it takes up whoever is not known yet and brings a registration.
    """

    def __call__(self, worker: int, registration: Registration | None) -> Peer | None: ...


class Connector:
    """Makes and accepts the connections of one worker.

    Args:
        me: This worker.
        is_open: Whether the group is open, so that others may not know this worker yet.
        token: Secret of this run, which both sides must know.
        capabilities: What this side's channels can do.
        timeout_s: Bound for one connection attempt, in seconds.
        make_link: Wraps a connected socket.
        adopt: Called with a peer and its new link, to start reading it.
    """

    def __init__(
        self,
        me: Registration,
        is_open: bool,
        token: str,
        capabilities: Capabilities,
        timeout_s: float,
        make_link: Callable[[socket.socket, Peer], Link],
        adopt: Callable[[Peer, Link], None],
    ) -> None:
        self._me = me
        self._worker = me.id
        # Whoever is dialled may not have heard of this worker.
        self._registration = {_REGISTRATION: me.as_json()} if is_open else {}
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
            send_greeting(connection, Kind.HELLO, self._greeting(to=peer))
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
        reason = "; ".join(errors) or "it listens nowhere that this side reaches"
        raise ConnectionRefusedError(reason + self._hint(peer))

    def _hint(self, peer: Peer) -> str:
        """Returns what would help where a peer on another host cannot be reached from here."""
        host, own_host = peer.registration.facts.get(HOST), self._me.facts.get(HOST)
        if not host or host == own_host:
            return ""
        return (
            f"; it is on host {host!r}, this worker on {own_host!r}: on each, set the variable "
            f"{knobs.LISTEN.variable} to the host's address, and see that nothing is blocked"
        )

    def _dial_data(self, peer: Peer, count: int) -> list[socket.socket]:
        """Makes data connections to a peer; raises OSError or ProtocolError where it cannot."""
        connections: list[socket.socket] = []
        try:
            hello = Greeting(self._worker, self._token, facts={_PURPOSE: _DATA, _TO: peer.id})
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

    def introduce(self, peer: Peer) -> None:
        """Has a member of an open group know this worker. Blocks at most the timeout.

        Raises:
            DuplicateName: It has the name or rank of this worker.
            OSError: It does not answer, or another worker does.
            ProtocolError: What answers is none of the group.
        """
        facts = {_PURPOSE: _INTRODUCTION, _TO: peer.id, **self._registration}
        with self._open(peer) as connection:
            send_greeting(connection, Kind.HELLO, Greeting(self._worker, self._token, facts=facts))
            answer = receive_greeting(connection, Kind.WELCOME, self._token, self._timeout_s)
        if answer.refusal == _TAKEN:
            raise DuplicateName(
                f"worker name {self._me.name!r} or rank {self._me.rank} is not unique: "
                f"worker {peer.name!r} (rank {peer.info.id}) is there already"
            )
        if answer.refusal:
            raise ConnectionRefusedError(f"turned away: {answer.refusal}")

    def accept(self, connection: socket.socket, lookup: Lookup) -> None:
        """Greets whoever has connected, and takes the connection if it is of the group."""
        try:
            addresses.tune(connection)
            greeting = self._receive(connection, Kind.HELLO)
            if greeting.facts.get(_TO, self._worker) != self._worker:
                self._answer(connection, "the worker that was here is gone")
                return
            peer = lookup(greeting.worker, _registration_in(greeting.facts))
            if peer is None:
                raise ProtocolError(f"there is no other worker {greeting.worker}")
        except DuplicateName:
            self._answer(connection, _TAKEN)
            return
        except Exception:
            connection.close()  # A stranger learns nothing, not even why.
            return
        purpose = greeting.facts.get(_PURPOSE)
        if purpose == _INTRODUCTION:
            self._answer(connection, "")
        elif purpose == _DATA:
            self._accept_data(connection, peer)
        else:
            self._accept_link(connection, peer, greeting)

    def _answer(self, connection: socket.socket, refusal: str) -> None:
        with connection, contextlib.suppress(OSError):
            send_greeting(connection, Kind.WELCOME, Greeting(self._worker, self._token, refusal))

    def _accept_link(self, connection: socket.socket, peer: Peer, greeting: Greeting) -> None:
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

    def _greeting(
        self, refusal: str = "", verdict: dict[str, str] | None = None, to: Peer | None = None
    ) -> Greeting:
        facts: dict[str, Any] = {
            "capabilities": self._capabilities.as_json(),
            "verdict": verdict,
        }
        if to is not None:
            facts |= {_TO: to.id, **self._registration}
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


def _registration_in(facts: dict[str, Any]) -> Registration | None:
    told = facts.get(_REGISTRATION)
    return None if told is None else Registration.decode(told)
