"""Takes the connections that others make to one worker, after they have proved who they are.

A stranger can open connections and send bytes. It gets a thread each, up to a limit, for a limited
time; beyond the limit the oldest one goes, since whoever belongs here is done in a moment. It
learns nothing but that it proved nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from torchweft import knobs
from torchweft.agent.connector import (
    ATTEMPT,
    CROSSED,
    DATA,
    INTRODUCTION,
    POSITION,
    PROBE,
    PURPOSE,
    REGISTRATION,
    RESUME,
    SESSION,
    SET,
    TAKEN,
    TO,
    VERDICT,
    Connector,
    Terms,
    position_in,
    send_verdict,
)
from torchweft.agent.peers import Peer
from torchweft.agent.shared_memory import close_all, map_memory
from torchweft.channel.capabilities import Capabilities
from torchweft.errors import DuplicateName, ProtocolError
from torchweft.protocol.membership import Registration
from torchweft.transport import addresses
from torchweft.transport.handshake import Greeting, Handshake, NotProven
from torchweft.transport.neighbours import check_user
from torchweft.transport.resumable import ResumableLink
from torchweft.transport.secure import secure_server
from torchweft.wire.messages import Kind


class Lookup(Protocol):
    """Returns the worker of an id; None where there is no other of that id.

    In an open group it takes up whoever is not known yet and brings a registration.
    """

    def __call__(self, worker: int, registration: Registration | None) -> Peer | None: ...


class Acceptor:
    """Takes connections of other workers.

    Args:
        connector: The worker's other end.
        lookup: Finds who it is that connects.
    """

    def __init__(self, connector: Connector, lookup: Lookup) -> None:
        self._connector = connector
        self._lookup = lookup
        self._limit = knobs.STRANGER_LIMIT.get()
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._is_closed = False

    def close(self) -> None:
        """Turns away who has connected and not said yet who it is, and whoever still comes."""
        with self._lock:
            self._is_closed = True
            for connection in self._strangers:
                _shut(connection)

    def accept(self, connection: socket.socket) -> None:
        """Greets whoever has connected, and takes the connection if it is of the group."""
        try:
            with self._admitted(connection):
                connection, handshake, greeting = self._greet(connection)
        except Exception:
            connection.close()  # A stranger learns nothing, not even why.
            return
        try:
            self._take(connection, handshake, greeting)
        except (OSError, ProtocolError):
            connection.close()

    @contextlib.contextmanager
    def _admitted(self, connection: socket.socket) -> Iterator[None]:
        """Counts a connection among those that have not proved anything yet."""
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("this worker has shut down")
            if len(self._strangers) >= self._limit:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _shut(oldest)
            self._strangers[connection] = None
        try:
            yield
        finally:
            with self._lock:
                self._strangers.pop(connection, None)

    def _greet(self, connection: socket.socket) -> tuple[socket.socket, Handshake, Greeting]:
        connector = self._connector
        deadline_s = time.monotonic() + connector.timeout_s
        addresses.tune(connection)
        if not connector.has_secret:
            check_user(connection)
        if connection.family != socket.AF_UNIX and connector.tls is not None:
            connection = secure_server(connection, connector.tls, connector.timeout_s)
        try:
            handshake = Handshake.accept(connection, connector.key, deadline_s)
            return connection, handshake, handshake.receive(Kind.HELLO)
        except NotProven:
            with connection:
                handshake.refuse_proof()
            raise
        except BaseException:
            connection.close()
            raise

    def _take(self, connection: socket.socket, handshake: Handshake, greeting: Greeting) -> None:
        if greeting.facts.get(TO, self._connector.worker) != self._connector.worker:
            self._answer(connection, handshake, "the worker that was here is gone")
            return
        try:
            peer = self._lookup(greeting.worker, _registration_in(greeting.facts))
        except DuplicateName:
            self._answer(connection, handshake, TAKEN)
            return
        if peer is None:
            raise ProtocolError(f"there is no other worker {greeting.worker}")
        purpose = greeting.facts.get(PURPOSE)
        if purpose == INTRODUCTION:
            self._answer(connection, handshake, "")
        elif purpose == DATA:
            self._take_data(connection, handshake, peer, greeting.facts)
        elif purpose in (RESUME, PROBE):
            self._take_session(connection, handshake, peer, greeting.facts)
        else:
            self._take_link(connection, handshake, peer, greeting)

    def _answer(self, connection: socket.socket, handshake: Handshake, refusal: str) -> None:
        with connection, contextlib.suppress(OSError):
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker, refusal))

    # The first connection

    def _take_link(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, greeting: Greeting
    ) -> None:
        terms = _terms_in(greeting.facts)
        if (terms is None) != (connection.family == socket.AF_UNIX):
            raise ProtocolError("a session goes over TCP, and only there")
        former = peer.link
        if terms is not None and isinstance(former, ResumableLink) and former.name == terms.name:
            # The dialler has not heard the answer to its first greeting.
            self._welcome_again(connection, handshake, peer, former, terms.attempt)
            return
        refusal = self._refusal(peer)
        if refusal:
            self._answer(connection, handshake, refusal)
            return
        try:
            theirs = self._connector.choose_channels(peer, connection, greeting)
            self._welcome(connection, handshake, peer)
            with_memory = bool(theirs.memory_nonce) and terms is None
            if with_memory:
                self._receive_memory(peer, handshake, theirs)
            link = self._connector.install(peer, connection, terms)
        except (OSError, ProtocolError):
            peer.is_accepting = False
            raise
        if with_memory:
            send_verdict(peer, link)

    def _welcome(self, connection: socket.socket, handshake: Handshake, peer: Peer) -> None:
        facts = self._connector.facts(verdict=peer.channels.verdict())
        with self._connector.memory.descriptor_for(connection) as descriptor:
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker, facts=facts), descriptor)

    def _welcome_again(
        self,
        connection: socket.socket,
        handshake: Handshake,
        peer: Peer,
        link: ResumableLink,
        attempt: int,
    ) -> None:
        with self._attempt(link, attempt):
            link.stop()
            try:
                self._welcome(connection, handshake, peer)
                self._connector.shell.resume(peer, link, connection, 0)
            except OSError as error:
                link.report_break(str(error))
                raise

    def _receive_memory(self, peer: Peer, handshake: Handshake, theirs: Capabilities) -> None:
        """Takes the dialler's memory, which comes with its verdict.

        A verdict without memory comes over the link, for which there is a handler.
        """
        memory: list[int] = []
        try:
            answer = handshake.receive(Kind.VERDICT, memory)
            map_memory(peer.channels, memory, theirs.memory_nonce)
        finally:
            close_all(memory)
        peer.channels.confirm(answer.facts.get(VERDICT))

    def _refusal(self, peer: Peer) -> str:
        with peer.state_lock:
            if peer.lost is not None:
                return _lost_before(peer)
            if peer.link is not None or (peer.is_dialling and self._connector.worker > peer.id):
                return CROSSED
            peer.is_accepting = True
            return ""

    # Further connections

    def _take_session(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, facts: dict[str, Any]
    ) -> None:
        is_begun = peer.is_accepting or peer.is_dialling
        link = peer.link
        is_known = isinstance(link, ResumableLink) and link.name == facts.get(SESSION)
        if peer.lost is not None:
            self._answer(connection, handshake, _lost_before(peer))
        elif is_begun and link is None:
            # It has not heard yet that the session stands. The other side tries again.
            raise ProtocolError("this side is not done yet")
        elif not is_known:
            self._answer(connection, handshake, "there is no such session")
        elif facts[PURPOSE] == PROBE:
            assert isinstance(link, ResumableLink)
            self._answer(connection, handshake, "")
            # Else this side has noticed, and dialled again since.
            if link.was_dialled and link.last_attempt == facts.get(ATTEMPT):
                link.break_off(f"worker {peer.name!r} says that it broke")
        else:
            assert isinstance(link, ResumableLink)
            self._resume(connection, handshake, peer, link, facts)

    def _resume(
        self,
        connection: socket.socket,
        handshake: Handshake,
        peer: Peer,
        link: ResumableLink,
        facts: dict[str, Any],
    ) -> None:
        position = position_in(facts)
        if link.was_dialled:
            raise ProtocolError("a session is resumed by whoever dialled it")
        with self._attempt(link, _number_in(facts, ATTEMPT)):
            told = {POSITION: link.stop()}
            try:
                handshake.send(Kind.WELCOME, Greeting(self._connector.worker, facts=told))
                self._connector.shell.resume(peer, link, connection, position)
            except OSError as error:
                link.report_break(str(error))
                raise

    @contextlib.contextmanager
    def _attempt(self, link: ResumableLink, attempt: int) -> Iterator[None]:
        """Gives a session a connection, unless a later attempt has done so."""
        with link.resuming:
            if attempt <= link.last_attempt:
                raise ProtocolError("a later attempt was here before")
            link.last_attempt = attempt
            yield

    def _take_data(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, facts: dict[str, Any]
    ) -> None:
        refusal = ""
        if peer.lost is not None:
            refusal = _lost_before(peer)
        elif peer.accept_data is None:
            refusal = "this worker takes no data connections"
        if refusal or peer.accept_data is None:
            self._answer(connection, handshake, refusal)
        else:
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker))
            peer.accept_data(connection, _number_in(facts, SET))


def _lost_before(peer: Peer) -> str:
    return f"this group lost worker {peer.name!r} before"


def _registration_in(facts: dict[str, Any]) -> Registration | None:
    told = facts.get(REGISTRATION)
    return None if told is None else Registration.decode(told)


def _terms_in(facts: dict[str, Any]) -> Terms | None:
    name = facts.get(SESSION)
    if name is None:
        return None
    if not isinstance(name, str):
        raise ProtocolError(f"a session is called {name!r}")
    return Terms(name, False, _number_in(facts, ATTEMPT))


def _number_in(facts: dict[str, Any], of: str) -> int:
    number = facts.get(of)
    if type(number) is not int:
        raise ProtocolError(f"the {of} of a connection has number {number!r}")
    return number


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
