"""Accepts and authenticates the connections that other workers dial to one worker.

Unauthenticated connections are limited in number, by ``Strangers``, and in time. Those of members
are told from those of strangers by their vouchers. An unauthenticated peer learns only that its
proof failed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torchweft import knobs
from torchweft.channel.channels import close_all
from torchweft.errors import DuplicateName, ProtocolError
from torchweft.protocol.greetings import POSITION, TAKEN, Answer, Hello, Purpose, Verdict
from torchweft.protocol.registration import Registration
from torchweft.protocol.strangers import Admission, Admissions, Strangers
from torchweft.secret import Secret
from torchweft.transport import addresses
from torchweft.transport.handshake import (
    Greeting,
    Handshake,
    NotProven,
    check_user,
    look_for_number,
)
from torchweft.transport.link import shut
from torchweft.transport.session import ResumableLink
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import Kind
from torchweft.worker.dialing import CAPABILITIES, REGISTRATION, VERDICT, Connector
from torchweft.worker.peers import Peer

_AT_A_TIME = 32
"""Connections that are accepted before the thread looks for other events."""


class Acceptor:
    """Accepts connections of other workers.

    Args:
        connector: Dials the same worker's connections.
        lookup: Returns the other worker with an id; None if there is none. In an open group, adds
            an unknown worker that sends its registration.
        begin: Has another thread call ``greet`` with a connection.
        dial: Has another thread dial a worker whose connection cannot be accepted.
        observers_key: The key of observers, which open connections for one question each.
    """

    def __init__(
        self,
        connector: Connector,
        lookup: Callable[[int, Registration | None], Peer | None],
        begin: Callable[[socket.socket], None],
        dial: Callable[[Peer], None],
        observers_key: Secret,
    ) -> None:
        self.answer: Callable[[str], bytes] | None = None
        """Returns the answer to an observer's question; a layer above sets it."""
        self._observers_key = observers_key
        self._connector = connector
        self._lookup = lookup
        self._acts = {
            Admission.BEGIN: begin,
            Admission.TURN_OUT: shut,
            Admission.CLOSE: socket.socket.close,
        }
        self._dial = dial
        self._lock = threading.Lock()
        self._strangers: Strangers[socket.socket] = Strangers(
            knobs.STRANGER_LIMIT.get(),
            lambda connection: look_for_number(connection, connector.key, connector.worker),
        )

    def accept(self, listener: socket.socket) -> None:
        """Takes some of the connections that are ready: has each greeted, or closes it.

        Returns soon: to be called again while ``listener``, which does not wait, has more.
        """
        with self._lock:
            for _ in range(_AT_A_TIME):
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    break
                self._act(self._strangers.came(connection))
            if not _is_readable(listener, 0.0):  # Otherwise this is called again.
                self._act(self._strangers.all_came())

    def close(self) -> None:
        """Closes unauthenticated connections and refuses later ones."""
        with self._lock:
            self._act(self._strangers.close())

    def _act(self, admissions: Admissions[socket.socket]) -> None:
        for what, connection in admissions:
            self._acts[what](connection)

    def greet(self, stranger: socket.socket) -> None:
        """Performs the handshake and keeps the connection if the peer belongs to the group."""
        with self._lock:
            self._act(self._strangers.began(stranger))
        try:
            connection, handshake, greeting = self._greet(stranger)
        except Exception:
            stranger.close()  # An unauthenticated peer is not told the reason.
            return
        finally:
            with self._lock:
                self._act(self._strangers.ended(stranger))
        try:
            self._take(connection, handshake, greeting)
        except (OSError, ProtocolError):
            connection.close()

    def _greet(self, connection: socket.socket) -> tuple[socket.socket, Handshake, Greeting]:
        connector = self._connector
        deadline_s = time.monotonic() + connector.timeout_s
        addresses.tune(connection)
        if not connector.has_secret:
            check_user(connection)
        tls = None if connection.family == socket.AF_UNIX else connector.tls
        if tls is not None:
            from torchweft.transport.secure import secure_server  # Imported with the options.

            self._await_first_bytes(connection, deadline_s)
            remaining_s = max(deadline_s - time.monotonic(), 0.01)
            connection = secure_server(connection, tls, remaining_s)
        try:
            handshake = Handshake.accept(connection, connector.key, deadline_s, self._observers_key)
            if tls is None:
                self._await_first_bytes(connection, deadline_s)
            return connection, handshake, handshake.receive(Kind.HELLO)
        except NotProven:
            with connection:
                handshake.refuse_proof()
            raise
        except BaseException:
            connection.close()
            raise

    def _await_first_bytes(self, connection: socket.socket, deadline_s: float) -> None:
        """Waits until there is something to read, and looks for a voucher in it."""
        _is_readable(connection, max(deadline_s - time.monotonic(), 0.0))
        with self._lock:
            self._act(self._strangers.heard(connection))

    def _take(self, connection: socket.socket, handshake: Handshake, greeting: Greeting) -> None:
        said = Hello.from_facts(greeting.facts)
        if handshake.is_observer or said.purpose is Purpose.OBSERVE:
            self._inform(connection, handshake, said)
            return
        answer = said.stray_answer(
            self._connector.worker, is_unix=connection.family == socket.AF_UNIX
        )
        if answer is not None:
            self._close(connection, handshake, answer)
            return
        try:
            peer = self._lookup(greeting.worker, _registration_in(greeting.facts))
        except DuplicateName:
            self._answer(connection, handshake, TAKEN)
            return
        if peer is None:
            raise ProtocolError(f"there is no other worker {greeting.worker}")
        with peer.state_lock:
            answer = peer.connecting.hello(self._connector.worker, said)
        if answer.must_dial and not self._connector.end_attempt(peer):
            self._dial(peer)
        if answer.verdict is Verdict.ACCEPT:
            self._accept_link(connection, handshake, peer, said, greeting)
        elif answer.verdict in (Verdict.RESUME, Verdict.WELCOME_AGAIN):
            self._resume(connection, handshake, peer, said)
        elif answer.verdict is Verdict.TAKE_DATA:
            self._take_data(connection, handshake, peer, said)
        else:
            self._close(connection, handshake, answer)
        if answer.verdict is Verdict.BREAK_OFF and isinstance(peer.link, ResumableLink):
            peer.link.break_off(f"worker {peer.name!r} says that it broke")

    def _close(self, connection: socket.socket, handshake: Handshake, answer: Answer) -> None:
        """Closes a connection that is not needed, after an answer unless told to hang up."""
        if answer.verdict is Verdict.HANG_UP:
            raise ProtocolError(answer.text)
        self._answer(connection, handshake, answer.text)

    def _answer(self, connection: socket.socket, handshake: Handshake, refusal: str) -> None:
        with connection, contextlib.suppress(OSError):
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker, refusal))

    def _inform(self, connection: socket.socket, handshake: Handshake, said: Hello) -> None:
        """Answers the question of an observer, and closes the connection."""
        if not handshake.is_observer or said.purpose is not Purpose.OBSERVE:
            raise ProtocolError("observers and members have different keys")
        if self.answer is None:
            self._answer(connection, handshake, "this worker is about to join its group, or leaves")
            return
        with connection:
            told = self.answer(said.question)
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker))
            connection.settimeout(self._connector.timeout_s)
            connection.sendall(b"".join(encode_frame(Kind.REPORT, 0, 0, told)))

    # The first connection

    def _accept_link(
        self,
        connection: socket.socket,
        handshake: Handshake,
        peer: Peer,
        said: Hello,
        greeting: Greeting,
    ) -> None:
        try:
            told = greeting.facts.get(CAPABILITIES)
            self._connector.channels.meet(peer, connection, told, [])
            self._welcome(connection, handshake, peer)
            is_local = said.terms is None
            if is_local:
                self._receive_verdict(connection, handshake, peer, told)
            self._connector.install(peer, connection, said.terms, begins_with_verdict=is_local)
        except BaseException:
            with peer.state_lock:
                peer.connecting.accept_failed()
            raise

    def _welcome(self, connection: socket.socket, handshake: Handshake, peer: Peer) -> None:
        facts = self._connector.facts(verdict=peer.ways.verdict())
        with self._connector.channels.handed_over(connection) as descriptor:
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker, facts=facts), descriptor)

    def _receive_verdict(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, told: object
    ) -> None:
        """Receives the dialler's verdict, and the descriptor that comes with it over Unix sockets.

        Over TCP, the verdict arrives over the link, where the agent handles it.
        """
        descriptors: list[int] = []
        try:
            answer = handshake.receive(Kind.VERDICT, descriptors)
            self._connector.channels.meet(peer, connection, told, descriptors)
        finally:
            close_all(descriptors)
        peer.ways.confirm(answer.facts.get(VERDICT))

    # Further connections

    def _resume(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, said: Hello
    ) -> None:
        """Resumes a session over a new connection, unless a later attempt already has."""
        link = peer.link
        assert isinstance(link, ResumableLink)
        with link.resuming:
            with peer.state_lock:
                is_latest = peer.connecting.take_attempt(said.attempt)
            if not is_latest:
                raise ProtocolError("a later attempt has replaced this one")
            told = {POSITION: link.stop()}
            try:
                if said.purpose is Purpose.LINK:
                    self._welcome(connection, handshake, peer)
                else:
                    handshake.send(Kind.WELCOME, Greeting(self._connector.worker, facts=told))
                self._connector.links.resume(peer, link, connection, said.position)
            except OSError as error:
                link.report_break(str(error))
                raise

    def _take_data(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, said: Hello
    ) -> None:
        handshake.send(Kind.WELCOME, Greeting(self._connector.worker))
        self._connector.channels.take(peer, connection, said.set_number)


def _registration_in(facts: dict[str, Any]) -> Registration | None:
    told = facts.get(REGISTRATION)
    return None if told is None else Registration.decode(told)


def _is_readable(connection: socket.socket, limit_s: float) -> bool:
    """Waits, for a limited time, until there is something to read, or a connection to accept."""
    arrived = select.poll()
    arrived.register(connection, select.POLLIN)
    return bool(arrived.poll(limit_s * 1e3))
