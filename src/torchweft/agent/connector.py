"""Makes the connections of one worker, after both sides have proved who they are.

What other workers dial, ``torchweft.agent.acceptor`` takes; both ends share what is in here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torchweft import knobs
from torchweft.agent.peers import Peer, Unreachable
from torchweft.agent.shared_memory import MemoryExchange, close_all, map_memory
from torchweft.channel.capabilities import Capabilities
from torchweft.channel.choice import choose
from torchweft.errors import ConfigurationError, DuplicateName, ProtocolError
from torchweft.protocol.membership import HOST, NETWORK, Registration
from torchweft.secret import Secret
from torchweft.transport import addresses
from torchweft.transport.handshake import Greeting, Handshake
from torchweft.transport.link import Link, LinkClosed
from torchweft.transport.neighbours import check_user
from torchweft.transport.resumable import ResumableLink
from torchweft.transport.secure import TlsOptions, secure_client
from torchweft.wire.frames import Buffer, encode_frame
from torchweft.wire.messages import Kind

CROSSED = "crossed"
TAKEN = "taken"
PURPOSE = "purpose"
DATA, INTRODUCTION, RESUME, PROBE = "data", "introduction", "resume", "probe"
REGISTRATION = "registration"
TO = "to"
SESSION, POSITION, ATTEMPT = "session", "position", "attempt"
SET = "set"
CAPABILITIES, VERDICT = "capabilities", "verdict"
_FIRST_PAUSE_S = 0.02
_DATA_LIMIT_S = 2.0
"""How long a data connection may take: whoever has something to send waits for it."""
_LONGEST_PAUSE_S = 0.5
_CROSSING_S = 0.25
"""How long a connection that the other side makes may take to arrive before this side dials."""


class Speechless(TimeoutError):
    """A worker did not speak in time. It may be busy, or stopped: it is not lost."""


class Refused(ConnectionRefusedError):
    """Nobody listens there, or whoever does turns this worker away: trying again is no use."""


class Gone(Refused):
    """Nobody listens any more where a worker of this host did."""


class Crossed(ConnectionError):
    """The other side makes a connection itself, which has not come yet: it lives."""


class Terms(NamedTuple):
    """Of a session: its name, whether this side dialled it, and at which attempt."""

    name: str
    was_dialled: bool
    attempt: int


class Shell(Protocol):
    """What becomes of connections: the part of the agent that both ends need."""

    def make_link(self, connection: socket.socket, peer: Peer, terms: Terms | None) -> Link:
        """Wraps a connected socket; with terms, in a session."""

    def adopt(self, peer: Peer, link: Link) -> None:
        """Makes a new link that of a peer, and begins to read it; raises LinkClosed if too late."""

    def resume(
        self, peer: Peer, link: ResumableLink, connection: socket.socket, position: int
    ) -> None:
        """Has a session go on over a new connection; the peer has received up to ``position``."""


class Connector:
    """Makes the connections of one worker.

    Args:
        me: This worker.
        is_open: Whether the group is open, so that others may not know this worker yet.
        key: What both sides must have.
        capabilities: What this side's channels can do.
        shell: Takes the connections.
        tls: How TCP connections are secured; None for not at all.
        has_secret: Whether the key is more than what others of this machine, or whoever reads the
            rendezvous store, may know. If not, only workers of this user here are talked to.
    """

    def __init__(
        self,
        me: Registration,
        is_open: bool,
        key: Secret,
        capabilities: Capabilities,
        shell: Shell,
        tls: TlsOptions | None,
        *,
        has_secret: bool,
    ) -> None:
        self.me = me
        self.worker = me.id
        self.key = key
        self.tls = tls
        self.has_secret = has_secret
        self.shell = shell
        self.memory = MemoryExchange()
        self.timeout_s = knobs.CONNECT_TIMEOUT_S.get()
        # Whoever is dialled may not have heard of this worker.
        self._registration = {REGISTRATION: me.as_json()} if is_open else {}
        self._capabilities = dataclasses.replace(capabilities, memory_nonce=self.memory.nonce)
        self._uses_unix = bool(knobs.UNIX_SOCKETS.get())
        self._dialling: set[socket.socket] = set()
        self._is_closed = False

    def close(self) -> None:
        """Lends no more memory to those who connect, and ends what is being dialled."""
        self._is_closed = True
        for connection in list(self._dialling):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.memory.close()

    # The first connection to a peer

    def connect(self, peer: Peer, deadline_s: float) -> Link:
        """Returns the link to ``peer``, dialling it if there is none. Blocks at most so long.

        Args:
            peer: The other worker.
            deadline_s: When to give up, by ``time.monotonic``; may be infinite.

        Raises:
            WorkerLost: The peer is lost.
            Unreachable: Nobody answers where it said it listens.
            Speechless: Somebody listens there, but did not speak in time: it may be busy.
        """
        remaining_s = deadline_s - time.monotonic()
        patience_s = -1 if remaining_s > threading.TIMEOUT_MAX else max(remaining_s, 0)
        if not peer.dial_lock.acquire(timeout=patience_s):
            raise Speechless("it is being dialled already")
        try:
            with peer.state_lock:
                if peer.link is not None:
                    return peer.link
                if peer.lost is not None:
                    raise peer.lost_error()
            return self._connect_patiently(peer, deadline_s)
        except Speechless:
            raise
        except (OSError, ProtocolError, LinkClosed, ConfigurationError) as error:
            if peer.lost is not None:
                raise peer.lost_error() from error
            if isinstance(error, Gone):
                raise Unreachable(str(error)) from error
            raise Unreachable(f"no connection to {_where(peer)}: {error}") from error
        finally:
            peer.is_dialling = False
            peer.dial_lock.release()

    def _connect_patiently(self, peer: Peer, deadline_s: float) -> Link:
        """Tries again where the network breaks or nobody speaks; not where the answer is no."""
        give_up_s = time.monotonic() + self.timeout_s
        name, pause_s = secrets.token_hex(16), _FIRST_PAUSE_S
        for attempt in itertools.count(1):
            limit_s = min(time.monotonic() + self.timeout_s, deadline_s)
            try:
                if self._may_dial(peer):
                    return self._dial(peer, Terms(name, True, attempt), limit_s)
                return self._await_link(peer, limit_s)
            except (Refused, LinkClosed, ProtocolError):
                raise
            except (TimeoutError, Crossed) as error:
                # Its system has accepted the connection, or it has answered: it lives.
                give_up_s = time.monotonic() + self.timeout_s
                if time.monotonic() + pause_s >= deadline_s:
                    raise Speechless(str(error)) from error
            except OSError as error:
                if time.monotonic() + pause_s > give_up_s:
                    raise
                if time.monotonic() + pause_s >= deadline_s:
                    raise Speechless(str(error)) from error
            if self._is_closed or peer.lost is not None:
                raise LinkClosed("it is not wanted any more")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("attempts do not end")

    def _may_dial(self, peer: Peer) -> bool:
        """Whether the other side is not making a connection already; from here on, this one is."""
        with peer.state_lock:
            peer.is_dialling = peer.link is None and not peer.is_accepting
            return peer.is_dialling

    def _dial(self, peer: Peer, terms: Terms, deadline_s: float) -> Link:
        connection = self._open(peer, deadline_s)
        self._dialling.add(connection)
        memory: list[int] = []
        is_unix = connection.family == socket.AF_UNIX
        try:
            handshake = self._begin(connection, deadline_s)
            facts = self.facts(to=peer)
            if not is_unix:
                facts |= {SESSION: terms.name, ATTEMPT: terms.attempt}
            handshake.send(Kind.HELLO, Greeting(self.worker, facts=facts))
            answer = handshake.receive(Kind.WELCOME, memory)
            if not answer.refusal:
                theirs = self.choose_channels(peer, connection, answer)
                map_memory(peer.channels, memory, theirs.memory_nonce)
                peer.channels.confirm(answer.facts.get(VERDICT))
                if is_unix and self.memory.nonce:
                    self._send_memory(peer, connection, handshake)
                    return self.install(peer, connection, None)
                link = self.install(peer, connection, None if is_unix else terms)
                send_verdict(peer, link)
                return link
        except BaseException:
            connection.close()
            raise
        finally:
            close_all(memory)
            self._dialling.discard(connection)
        connection.close()
        if answer.refusal == CROSSED:
            try:
                return self._await_link(peer, deadline_s)
            except ConnectionError as error:
                raise Crossed(str(error)) from None
        raise Refused(f"turned away: {answer.refusal}")

    def _send_memory(self, peer: Peer, connection: socket.socket, handshake: Handshake) -> None:
        verdict = Greeting(self.worker, facts={VERDICT: peer.channels.verdict()})
        with self.memory.descriptor_for(connection) as descriptor:
            handshake.send(Kind.VERDICT, verdict, descriptor)

    def _await_link(self, peer: Peer, deadline_s: float) -> Link:
        """Waits for the connection that the other side is making.

        Raises:
            ConnectionError: It came to nothing, or has not come; the other side may be dead.
        """
        doubtful_s = min(time.monotonic() + _CROSSING_S, deadline_s)
        while not peer.linked.wait(_FIRST_PAUSE_S) and time.monotonic() < deadline_s:
            if not peer.is_accepting and time.monotonic() > doubtful_s:
                break
        if peer.link is not None:
            return peer.link
        raise ConnectionError("the connection that it was making itself never came")

    # Further connections

    def resume(self, peer: Peer, link: ResumableLink, timeout_s: float) -> None:
        """Has a session that this side dialled go on over a new connection.

        Args:
            peer: The other side.
            link: The session; its connection ends when the peer has answered.
            timeout_s: How long it may take, in seconds.

        Raises:
            Refused: The peer is not there any more, or has forgotten the session.
            ProtocolError: Whoever answers is not the peer.
            TimeoutError: Somebody listens there, and does not speak.
            OSError: There is no connection.
        """
        with self._greeted(peer, timeout_s) as (connection, handshake):
            # What still comes over the old connection from here on is sent again.
            position = link.stop()
            link.last_attempt += 1
            facts = {SESSION: link.name, POSITION: position, ATTEMPT: link.last_attempt}
            answer = self._ask(peer, handshake, RESUME, facts)
            self.shell.resume(peer, link, connection, position_in(answer.facts))

    def probe(self, peer: Peer, link: ResumableLink, timeout_s: float) -> None:
        """Tells the side that dialled a session that it has broken. Raises as ``resume``."""
        # Before anything that takes time: meanwhile it may be resumed, and whole again.
        facts = {SESSION: link.name, ATTEMPT: link.last_attempt}
        with self._greeted(peer, timeout_s) as (connection, handshake):
            self._ask(peer, handshake, PROBE, facts)
            connection.close()

    def introduce(self, peer: Peer, timeout_s: float) -> None:
        """Has a member of an open group know this worker. Blocks at most the timeout.

        Raises:
            DuplicateName: It has the name or rank of this worker.
            OSError: It does not answer, or another worker does.
            ProtocolError: What answers is none of the group.
        """
        with self._greeted(peer, min(timeout_s, self.timeout_s)) as (connection, handshake):
            try:
                self._ask(peer, handshake, INTRODUCTION, {})
            except Refused as error:
                if TAKEN not in error.args:
                    raise
                raise DuplicateName(
                    f"worker name {self.me.name!r} or rank {self.me.rank} is not unique: "
                    f"worker {peer.name!r} (rank {peer.info.id}) is there already"
                ) from None
            connection.close()

    def _dial_data(self, peer: Peer, count: int, number: int) -> list[socket.socket]:
        """Makes data connections to a peer, a set with a number.

        Raises:
            OSError: They cannot be made.
            ProtocolError: Whoever answers is not the peer.
        """
        connections: list[socket.socket] = []
        try:
            for _ in range(count):
                limit_s = min(self.timeout_s, _DATA_LIMIT_S)
                with self._greeted(peer, limit_s) as (connection, handshake):
                    self._ask(peer, handshake, DATA, {SET: number})
                    connections.append(connection)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        return connections

    @contextlib.contextmanager
    def _greeted(self, peer: Peer, timeout_s: float) -> Iterator[tuple[socket.socket, Handshake]]:
        """Connects, up to the peer's challenge; closes the connection where the block raises."""
        deadline_s = time.monotonic() + timeout_s
        connection = self._open(peer, deadline_s)
        try:
            yield connection, self._begin(connection, deadline_s)
        except BaseException:
            connection.close()
            raise

    def _begin(self, connection: socket.socket, deadline_s: float) -> Handshake:
        """Waits for the challenge; without a secret, from one of this user only."""
        handshake = Handshake.dial(connection, self.key, deadline_s)
        if not self.has_secret:
            check_user(connection)
        return handshake

    def _ask(
        self, peer: Peer, handshake: Handshake, purpose: str, facts: dict[str, Any]
    ) -> Greeting:
        said = {PURPOSE: purpose, TO: peer.id, **facts, **self._registration}
        handshake.send(Kind.HELLO, Greeting(self.worker, facts=said))
        answer = handshake.receive(Kind.WELCOME)
        if answer.refusal == TAKEN:
            raise Refused(TAKEN)
        if answer.refusal:
            raise Refused(f"turned away: {answer.refusal}")
        return answer

    def _open(self, peer: Peer, deadline_s: float) -> socket.socket:
        """Connects to where a peer listens.

        Raises:
            Refused: Nobody listens there, or it cannot be dialled from here.
            OSError: The network does not carry that far now.
        """
        errors: list[str] = []
        is_final = was_heard = True
        for text in peer.registration.addresses:
            try:
                address = addresses.parse(text)
                if self._uses_unix or not isinstance(address, addresses.UnixAddress):
                    return self._open_at(address, deadline_s)
            except (TimeoutError, ProtocolError):
                raise  # Somebody listens there, who does not speak, or not the same.
            except (OSError, ConfigurationError) as error:
                errors.append(f"{text}: {getattr(error, 'strerror', None) or error}")
                is_final &= isinstance(error, (ConnectionRefusedError, ConfigurationError))
                was_heard &= not isinstance(error, ConfigurationError)
        network = self.me.facts.get(NETWORK)
        is_here = bool(network) and peer.registration.facts.get(NETWORK) == network
        if is_final and was_heard and errors and is_here:
            raise Gone("its process has ended: nobody listens any more where it did")
        # Of another host, whose Unix sockets are not here, only the others are of interest.
        far = [error for error in errors if not error.startswith("unix:")]
        reason = "; ".join(far or errors) or "it listens nowhere that this side reaches"
        raise (Refused if is_final else ConnectionError)(reason + self._hint(peer))

    def _open_at(self, address: addresses.Address, deadline_s: float) -> socket.socket:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise OSError("there was no time left to dial")
        if isinstance(address, addresses.TcpAddress) and address.is_secure != bool(self.tls):
            here, there = ("with", "without") if self.tls is not None else ("without", "with")
            raise ConfigurationError(
                f"it is a worker {there} TLS, this one is {here}; give all the same tls options"
            )
        if addresses.is_far(address) and not self.has_secret:
            raise ConfigurationError(
                "without a secret, a worker connects to others of its own machine only; give all "
                f"of them the same: {knobs.SECRET_FILE.variable}=FILE, or secret=..."
            )
        try:
            connection = addresses.dial(address, remaining_s)
        except TimeoutError:
            raise ConnectionError(f"no answer within {remaining_s:.1f} s") from None
        if self.tls is None or isinstance(address, addresses.UnixAddress):
            return connection
        try:
            return secure_client(connection, self.tls, max(deadline_s - time.monotonic(), 0.01))
        except BaseException as error:
            connection.close()
            if isinstance(error.__cause__, ConnectionError):
                raise ConnectionError(str(error)) from error  # It may have been the network.
            raise

    def _hint(self, peer: Peer) -> str:
        """Returns what would help where a peer on another host cannot be reached from here."""
        host, own_host = peer.registration.facts.get(HOST), self.me.facts.get(HOST)
        if not host or host == own_host:
            return ""
        return (
            f"; it is on host {host!r}, this worker on {own_host!r}: on each, set the variable "
            f"{knobs.LISTEN.variable} to the host's address and {knobs.SECRET_FILE.variable} to a "
            "file with the group's secret, and see that nothing is blocked"
        )

    # What both ends do

    def facts(self, verdict: dict[str, str] | None = None, to: Peer | None = None) -> Any:
        """Returns what this side says of itself in a greeting."""
        facts: dict[str, Any] = {CAPABILITIES: self._capabilities.as_json(), VERDICT: verdict}
        if to is not None:
            facts |= {TO: to.id, **self._registration}
        return facts

    def choose_channels(
        self, peer: Peer, connection: socket.socket, greeting: Greeting
    ) -> Capabilities:
        """Finds out which ways lead from a peer to here; returns what it said of itself."""
        theirs = Capabilities.from_json(greeting.facts.get(CAPABILITIES))
        peer.channels = choose(self._capabilities, theirs, f"worker {peer.name!r}")
        self.memory.lend(peer.channels, connection)
        return theirs

    def install(self, peer: Peer, connection: socket.socket, terms: Terms | None) -> Link:
        """Makes a connection the link to a peer."""
        link = self.shell.make_link(connection, peer, terms)
        peer.dial_data = functools.partial(self._dial_data, peer)
        self.shell.adopt(peer, link)
        peer.linked.set()
        return link


def send_verdict(peer: Peer, link: Link) -> None:
    """Tells a peer, over its new link, what can be received from it.

    Raises nothing where the link has ended: the connection is its own, and its reader finds out.
    """
    control = json.dumps(peer.channels.verdict()).encode()
    with contextlib.suppress(LinkClosed):
        link.send(encode_frame(Kind.VERDICT, 0, 0, control), may_block=False)


def verdict_in(control: Buffer) -> object:
    """Reads what ``send_verdict`` sent; raises ProtocolError where it makes no sense."""
    try:
        # As UTF-8: what json takes for another encoding has Python import a codec.
        return json.loads(bytes(control).decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a verdict makes no sense: {error}") from error


def position_in(facts: dict[str, Any]) -> int:
    """Returns the position of the other side in a session; raises ProtocolError if it is none."""
    position = facts.get(POSITION)
    if type(position) is not int or position < 0:
        raise ProtocolError(f"a session goes on at byte {position!r}, which is no position")
    return position


def _where(peer: Peer) -> str:
    return f"worker {peer.name!r} at {', '.join(peer.registration.addresses) or 'no address'}"
