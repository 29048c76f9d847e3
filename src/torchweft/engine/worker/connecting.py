"""Makes the connections of one worker: dials and accepts them, and authenticates both sides.

``engine.protocol.connecting`` decides what is done. Unauthenticated connections are limited in
number, by ``Strangers``, and in time. Those of members are told from those of strangers by their
vouchers. An unauthenticated peer learns only that its proof failed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchweft import knobs
from torchweft.engine.channels.channels import Channels, close_all
from torchweft.engine.io import addresses, ring
from torchweft.engine.io.handshake import (
    Greeting,
    Handshake,
    NotProven,
    check_user,
    frame_with,
    look_for_number,
    new_voucher,
)
from torchweft.engine.io.link import Link, LinkClosed, shut
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.protocol.connecting import (
    POSITION,
    TAKEN,
    Answer,
    Busy,
    Dial,
    Done,
    FirstDial,
    HandshakeTimeout,
    Hello,
    Lose,
    Means,
    Probe,
    Purpose,
    Reaching,
    Refused,
    Resume,
    Taken,
    Terms,
    Verdict,
    Wait,
    check_welcome,
    failure_of,
    no_connection,
    position_in,
)
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.protocol.strangers import Admission, Admissions, Strangers
from torchweft.engine.wire.frames import Buffer, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.connections import Links
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ConfigurationError, DuplicateName, ProtocolError
from torchweft.native import native
from torchweft.secret import Secret

if TYPE_CHECKING:
    from torchweft.engine.io.secure import TlsOptions

REGISTRATION = "registration"
CAPABILITIES, VERDICT, RING = "capabilities", "verdict", "ring"
_DATA_LIMIT_S = 2.0
"""Time limit for making a data connection: a thread with tensors to send waits for it."""


class Connector:
    """Makes the connections of one worker.

    Args:
        me: This worker.
        is_open: Whether the group is open, so that other workers may not know this worker yet.
        key: The key that both sides must have.
        channels: The channels for tensors.
        links: Takes over the connections.
        tls: How TCP connections are secured; None for no TLS.
        has_secret: Whether the key includes a secret that other users of this machine, or readers
            of the rendezvous store, do not know. If not, this worker talks only to workers of this
            user on this machine.
    """

    def __init__(
        self,
        me: Registration,
        is_open: bool,
        key: Secret,
        channels: Channels,
        links: Links,
        tls: TlsOptions | None,
        *,
        has_secret: bool,
    ) -> None:
        self.me = me
        self.worker = me.id
        self.key = key
        self.tls = tls
        self.has_secret = has_secret
        self.links = links
        self.channels = channels
        self.offers_ring = native is not None and not me.is_strict
        self.timeout_s = knobs.CONNECT_TIMEOUT_S.get()
        # In an open group, the dialled worker may not know this worker yet.
        self._registration = {REGISTRATION: me.as_json()} if is_open else {}
        self._means = Means(has_secret, tls is not None, bool(knobs.UNIX_SOCKETS.get()))
        self._making: dict[socket.socket, Peer | None] = {}
        """The connections that are being made; each first one with its peer."""
        self._closed = threading.Event()

    def close(self) -> None:
        """Aborts connections that are being dialled."""
        self._closed.set()
        for connection in list(self._making):
            shut(connection)

    # The first connection to a peer

    def connect(self, peer: Peer, deadline_s: float) -> Link:
        """Returns the link to ``peer``, dialled now if needed. Blocks until ``deadline_s`` at most.

        Args:
            peer: The other worker.
            deadline_s: When to give up, by ``time.monotonic``; may be infinite.

        Raises:
            WorkerLost: The peer is lost.
            Unreachable: The peer does not answer at its addresses.
            HandshakeTimeout: The peer's address accepts connections, but the peer did not answer
                in time: it may be busy.
        """
        remaining_s = deadline_s - time.monotonic()
        patience_s = -1 if remaining_s > threading.TIMEOUT_MAX else max(remaining_s, 0)
        if not peer.dial_lock.acquire(timeout=patience_s):
            raise HandshakeTimeout("it is being dialled already")
        try:
            return self._carry_out(peer, deadline_s)
        finally:
            with peer.state_lock:
                peer.connecting.want_no_more()
            peer.dial_lock.release()

    def _carry_out(self, peer: Peer, deadline_s: float) -> Link:
        """Carries out the steps of the state machine until there is a link or it gives up."""
        connecting, cause = peer.connecting, None
        with peer.state_lock:
            name = secrets.token_hex(16)
            step = connecting.want(time.monotonic(), deadline_s, self.timeout_s, name)
        while not isinstance(step, Done):
            error = None
            if isinstance(step, Busy):
                raise HandshakeTimeout(step.cause) from cause
            if isinstance(step, Lose) or self._closed.is_set():
                raise no_connection(peer.name, peer.registration.addresses, step) from cause
            if isinstance(step, Dial):
                error = self._try_to_dial(peer, step)
                cause = error or cause
            else:
                peer.linked.wait(max(step.until_s - time.monotonic(), 0.0))
            with peer.state_lock:
                now_s = time.monotonic()
                if error is None:
                    step = connecting.go_on(now_s)
                else:
                    step = connecting.dial_failed(now_s, failure_of(error), str(error))
        if peer.lost is not None:
            raise peer.lost_error() from cause
        assert peer.link is not None
        return peer.link

    def end_attempt(self, peer: Peer) -> bool:
        """Aborts the attempt to make the first connection; returns whether there was one."""
        first = [made for made, to in self._making.copy().items() if to is peer]
        for connection in first:
            shut(connection)
        return bool(first)

    def _try_to_dial(self, peer: Peer, step: Dial) -> Exception | None:
        """Makes one attempt; returns the error if it failed."""
        try:
            self._dial(peer, step.terms, step.limit_s)
        except LinkClosed as error:
            return Refused(str(error))  # It comes too late.
        except (OSError, ProtocolError, ConfigurationError) as error:
            return error
        return None

    def _dial(self, peer: Peer, terms: Terms, deadline_s: float) -> None:
        descriptors: list[int] = []
        with (
            self._greeted(peer, deadline_s, is_first=True) as (connection, handshake),
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(close_all, descriptors)
            with peer.state_lock:
                may_offer = peer.connecting.offer()
            if not may_offer:
                connection.close()
                return
            is_local = connection.family == socket.AF_UNIX
            offered = None if is_local else terms
            said = Hello.about(Purpose.LINK, peer.id, offered)
            may_ring = is_local and self.offers_ring
            answer = self._ask(handshake, said, self.facts() | {RING: may_ring}, descriptors)
            taken = None
            if may_ring and answer.facts.get(RING) is True:
                taken = ring.take(descriptors)
            self.channels.meet(peer, connection, answer.facts.get(CAPABILITIES), descriptors)
            peer.ways.confirm(answer.facts.get(VERDICT))
            if is_local:
                facts = {VERDICT: peer.ways.verdict(), RING: taken is not None}
                with self.channels.handed_over(connection) as handed:
                    given = [handed] if handed is not None else []
                    handshake.send(Kind.VERDICT, Greeting(self.worker, facts=facts), given)
            link = self.install(peer, connection, offered, with_ring=taken)
            if not is_local:
                send_verdict(peer, link)

    # Further connections

    def redial(self, peer: Peer, link: ResumableLink) -> None:
        """Resumes a session, or asks the side that dialled it to, as the state machine decides.

        Blocks for a limited time.

        Raises:
            Refused: The peer is gone, or has forgotten the session.
            ProtocolError: The answer does not come from the peer.
            TimeoutError: The peer's address accepts connections, but the peer does not answer.
            LinkClosed: The session has ended.
            OSError: No connection could be made.
        """
        session = peer.connecting.session
        was_dialled = session is not None and session.was_dialled
        with link.resuming if was_dialled else contextlib.nullcontext():
            # Race: the session may have been resumed while this thread waited for the lock.
            with peer.state_lock:
                asked = peer.connecting.redial(time.monotonic(), self.timeout_s)
            if isinstance(asked, Resume):
                self.resume(peer, link, asked.limit_s)
            elif isinstance(asked, Probe):
                self.probe(peer, asked.terms, asked.limit_s)
                with peer.state_lock:
                    peer.connecting.probed(time.monotonic())

    def resume(self, peer: Peer, link: ResumableLink, deadline_s: float) -> None:
        """Continues a session that this side dialled, over a new connection."""
        with self._greeted(peer, deadline_s) as (connection, handshake):
            with peer.state_lock:
                terms = peer.connecting.next_attempt()
            if terms is None:
                raise LinkClosed("the session has ended")
            # Data that arrives over the old connection from here on is retransmitted.
            position = link.stop()
            said = Hello.about(Purpose.RESUME, peer.id, terms, position)
            answer = self._ask(handshake, said)
            self.links.resume(peer, link, connection, position_in(answer.facts))

    def probe(self, peer: Peer, terms: Terms, deadline_s: float) -> None:
        """Tells the side that dialled a session that its connection broke."""
        with self._greeted(peer, deadline_s) as (connection, handshake):
            self._ask(handshake, Hello.about(Purpose.PROBE, peer.id, terms))
            connection.close()

    def introduce(self, peer: Peer, timeout_s: float) -> None:
        """Introduces this worker to a member of an open group. Blocks at most the timeout.

        Dials again if the connection breaks. A member that does not answer is given up after
        ``WEFT_CONNECT_TIMEOUT_S``.

        Raises:
            DuplicateName: The member has the name or rank of this worker.
            OSError: The member does not answer, or another worker does.
            ProtocolError: The answer does not come from a worker of the group.
        """
        now_s = time.monotonic()
        tries = FirstDial(now_s, now_s + min(timeout_s, self.timeout_s), self.timeout_s)
        while True:
            try:
                self._introduce_once(peer, tries.limit_s(time.monotonic()))
                return
            except (OSError, ProtocolError) as error:
                now_s = time.monotonic()
                step = tries.failed(now_s, failure_of(error), str(error))
                if not isinstance(step, Wait) or self._closed.wait(step.until_s - now_s):
                    raise

    def _introduce_once(self, peer: Peer, deadline_s: float) -> None:
        with self._greeted(peer, deadline_s) as (connection, handshake):
            try:
                self._ask(handshake, Hello(Purpose.INTRODUCTION, peer.id))
            except Taken:
                is_namesake = peer.name == self.me.name or peer.info.id == self.me.rank
                where = "is" if is_namesake else "knows another worker that is"
                raise DuplicateName(
                    f"worker name {self.me.name!r} or rank {self.me.rank} is not unique: "
                    f"worker {peer.name!r} (rank {peer.info.id}) {where} there already"
                ) from None
            connection.close()

    def dial_data(self, peer: Peer, count: int, number: int) -> list[socket.socket]:
        """Dials a numbered set of connections that carry tensors to a peer.

        Raises:
            OSError: The connections cannot be made.
            ProtocolError: The answer does not come from the peer.
        """
        connections: list[socket.socket] = []
        try:
            for _ in range(count):
                deadline_s = time.monotonic() + min(self.timeout_s, _DATA_LIMIT_S)
                with self._greeted(peer, deadline_s) as (connection, handshake):
                    self._ask(handshake, Hello(Purpose.DATA, peer.id, set_number=number))
                    connections.append(connection)
        except BaseException:
            for connection in connections:
                connection.close()
            raise
        return connections

    @contextlib.contextmanager
    def _greeted(
        self, peer: Peer, deadline_s: float, *, is_first: bool = False
    ) -> Iterator[tuple[socket.socket, Handshake]]:
        """Connects and awaits the peer's challenge; closes the connection if the block raises."""
        connection = self._open(peer, deadline_s)
        self._making[connection] = peer if is_first else None
        try:
            if self._closed.is_set():  # Then ``close`` may have missed this connection.
                raise ConnectionAbortedError("this worker has shut down")
            handshake = Handshake.dial(connection, self.key, deadline_s)
            if not self.has_secret:  # Only a process of this user is accepted.
                check_user(connection)
            yield connection, handshake
        except BaseException:
            connection.close()
            raise
        finally:
            del self._making[connection]

    def _ask(
        self,
        handshake: Handshake,
        said: Hello,
        facts: dict[str, Any] | None = None,
        descriptors: list[int] | None = None,
    ) -> Greeting:
        """Sends the ``HELLO`` of a connection; returns the ``WELCOME`` if it is not a refusal."""
        facts = (facts or {}) | self._registration | said.facts()
        handshake.send(Kind.HELLO, Greeting(self.worker, facts=facts))
        answer = handshake.receive(Kind.WELCOME, descriptors)
        check_welcome(answer.refusal)
        return answer

    def _open(self, peer: Peer, deadline_s: float) -> socket.socket:
        """Connects to an address at which a peer listens.

        Raises:
            Refused: Nothing listens there, or the peer cannot be dialled from here.
            OSError: The network does not reach the peer now.
        """
        reaching = Reaching(self.me.facts, peer.registration.facts, self._means)
        for text in peer.registration.addresses:
            try:
                address = addresses.parse(text)
                is_secure = getattr(address, "is_secure", None)  # Not of a Unix socket.
                if reaching.may_dial(text, is_secure, is_far=addresses.is_far(address)):
                    return self._open_at(address, peer, deadline_s)
            except (OSError, ProtocolError, ConfigurationError) as error:
                if not reaching.goes_on_after(text, error):
                    raise
        raise reaching.error()

    def _open_at(self, address: addresses.Address, peer: Peer, deadline_s: float) -> socket.socket:
        """Connects to a worker's address, and sends a voucher at once."""
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise OSError("there was no time left to dial")
        try:
            connection = addresses.dial(address, remaining_s)
        except TimeoutError:
            raise ConnectionError(f"no answer within {remaining_s:.1f} s") from None
        try:
            with peer.state_lock:
                peer.connecting.reached(time.monotonic())
            voucher = new_voucher(self.key, peer.id)
            if self.tls is None or isinstance(address, addresses.UnixAddress):
                connection.sendall(frame_with(voucher))
                return connection
            from torchweft.engine.io.secure import secure_client  # Imported with the options.

            remaining_s = max(deadline_s - time.monotonic(), 0.01)
            return secure_client(connection, self.tls, remaining_s, voucher)
        except BaseException as error:
            connection.close()
            if isinstance(error.__cause__, ConnectionError):
                raise ConnectionError(str(error)) from error  # The network may be the cause.
            raise

    # What both ends do

    def facts(self, verdict: dict[str, str] | None = None) -> dict[str, Any]:
        """Returns the facts about this side's channels for a greeting."""
        return {CAPABILITIES: self.channels.describe(), VERDICT: verdict}

    def install(
        self,
        peer: Peer,
        connection: socket.socket,
        terms: Terms | None,
        *,
        with_ring: ring.Ring | None = None,
        begins_with_verdict: bool = False,
    ) -> Link:
        """Installs a connection as the link to a peer.

        Args:
            peer: The peer.
            connection: The connection, after its handshake; owned from here on.
            terms: The terms of the session; None without one.
            with_ring: What carries the data between processes of one host, if both can.
            begins_with_verdict: Whether the verdict is sent before the messages of other threads,
                so that the peer can use each channel from its first tensor on. Not for a session,
                which may break only once it is adopted.
        """
        link = self.links.make_link(connection, peer, terms, with_ring)
        if begins_with_verdict:
            send_verdict(peer, link)
        self.links.adopt(peer, link, terms)
        peer.linked.set()
        return link


def send_verdict(peer: Peer, link: Link) -> None:
    """Tells a peer, over its new link, over which channels this side can receive from it.

    Raises nothing if the link has ended: the link owns the connection, and its reader finds out.
    """
    control = json.dumps(peer.ways.verdict()).encode()
    with contextlib.suppress(LinkClosed):
        link.send(encode_frame(Kind.VERDICT, 0, 0, control), may_block=False)


def verdict_in(control: Buffer) -> object:
    """Decodes the message of ``send_verdict``; raises ProtocolError if it is malformed."""
    try:
        # As UTF-8: if json detected another encoding, Python would import a codec.
        return json.loads(bytes(control).decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a verdict is malformed: {error}") from error


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
            from torchweft.engine.io.secure import secure_server  # Imported with the options.

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
            is_local = said.terms is None
            may_ring = is_local and self._connector.offers_ring and greeting.facts.get(RING) is True
            with ring.offer(is_wanted=may_ring) as (made, descriptors):
                self._welcome(connection, handshake, peer, descriptors)
            takes_ring = is_local and self._receive_verdict(connection, handshake, peer, told)
            self._connector.install(
                peer,
                connection,
                said.terms,
                with_ring=made if takes_ring else None,
                begins_with_verdict=is_local,
            )
        except BaseException:
            with peer.state_lock:
                peer.connecting.accept_failed()
            raise

    def _welcome(
        self,
        connection: socket.socket,
        handshake: Handshake,
        peer: Peer,
        of_ring: Sequence[int] = (),
    ) -> None:
        facts = self._connector.facts(verdict=peer.ways.verdict()) | {RING: bool(of_ring)}
        with self._connector.channels.handed_over(connection) as handed:
            given = [*([] if handed is None else [handed]), *of_ring]
            handshake.send(Kind.WELCOME, Greeting(self._connector.worker, facts=facts), given)

    def _receive_verdict(
        self, connection: socket.socket, handshake: Handshake, peer: Peer, told: object
    ) -> bool:
        """Receives the dialler's verdict, and the descriptor that comes with it over Unix sockets.

        Returns whether the dialler has taken the ring.

        Over TCP, the verdict arrives over the link, where the agent handles it.
        """
        descriptors: list[int] = []
        try:
            answer = handshake.receive(Kind.VERDICT, descriptors)
            self._connector.channels.meet(peer, connection, told, descriptors)
        finally:
            close_all(descriptors)
        peer.ways.confirm(answer.facts.get(VERDICT))
        return answer.facts.get(RING) is True

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
