"""The handshake: each side of a new connection identifies itself and proves that it may join.

The acceptor begins with a *challenge*, a random number. The dialler answers with its own random
number; its *voucher* may come before that. Every greeting carries a proof: a keyed hash
(HMAC-SHA256) of both numbers, the direction, the kind, its place in the order and its text. So each
side proves to the other, afresh on each connection, that it has the key: a proof recorded on
another connection is worthless.

The texts are JSON, and are parsed only after their proof has been checked; nothing is unpickled.
What a stranger can send is limited in size and in time.

A voucher is the first data of a member's connection, and tells it from those of strangers. A worker
that strangers flood must make room before it can perform a handshake with anyone. A
voucher shows, before any question, that its sender has the key. It admits nobody: the handshake
follows. Over TLS the voucher is the server name in the first message, otherwise a frame.

Without a secret, any reader of the rendezvous store could join. So workers without a secret talk
only to their own user. The kernel names that user: for a Unix socket on request, for a TCP
connection within the machine in a table of all connections.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchweft.engine.wire.frames import HEADER, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError
from torchweft.secret import Secret

VERSION = 8
LIMIT_BYTES = 1 << 16
"""Largest greeting accepted."""
NONCE_BYTES = 32
PROOF_BYTES = 32

_MAGIC = b"weft"
_CHALLENGE = struct.Struct(f"<4sH{NONCE_BYTES}s")
_DIALLER, _ACCEPTOR = b"dialler", b"acceptor"
_DESCRIPTOR = struct.Struct("i")
_MOST_DESCRIPTORS = 2
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class NotProven(ProtocolError):
    """The other side could not prove that it belongs to this run."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """One side's description of itself.

    Attributes:
        worker: The id of the worker.
        refusal: The reason for refusing the connection; empty if it is accepted.
        facts: Further facts, for instance about tensor channels.
    """

    worker: int
    refusal: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Handshake:
    """The greetings of both sides on one connection; one thread at a time.

    Args:
        connection: A connected socket; its timeout is changed.
        key: The key that both sides must have.
        deadline_s: When to give up, by ``time.monotonic``.
        is_dialler: Whether this side dialled.
        observers_key: The key of diallers that observe the group and are no members, if any.

    Attributes:
        is_observer: Whether the dialler has proved that it has the key of observers.
    """

    def __init__(
        self,
        connection: socket.socket,
        key: Secret,
        deadline_s: float,
        *,
        is_dialler: bool,
        observers_key: Secret | None = None,
    ) -> None:
        self.is_observer = False
        self._connection = connection
        self._key = key
        self._observers_key = observers_key
        self._deadline_s = deadline_s
        self._roles = (_DIALLER, _ACCEPTOR) if is_dialler else (_ACCEPTOR, _DIALLER)
        self._counts = [0, 0]
        self._challenge = b""
        self._answer = b""
        self._may_skip_voucher = True

    @classmethod
    def dial(cls, connection: socket.socket, key: Secret, deadline_s: float) -> Handshake:
        """Begins the handshake as the dialler; waits for the challenge.

        Raises:
            ProtocolError: The listener does not speak this protocol, or speaks another version.
            TimeoutError: No challenge arrived in time.
            OSError: The connection ended.
        """
        handshake = cls(connection, key, deadline_s, is_dialler=True)
        said = handshake._receive_frame(Kind.CHALLENGE, _CHALLENGE.size)
        if len(said) != _CHALLENGE.size:
            raise ProtocolError("the other side does not speak Weft's protocol")
        magic, version, handshake._challenge = _CHALLENGE.unpack(said)
        if magic != _MAGIC:
            raise ProtocolError("the other side does not speak Weft's protocol")
        if version != VERSION:
            raise ProtocolError(
                f"the other side speaks version {version} of the protocol, this one {VERSION}; "
                "install the same Weft everywhere"
            )
        handshake._answer = secrets.token_bytes(NONCE_BYTES)
        return handshake

    @classmethod
    def accept(
        cls,
        connection: socket.socket,
        key: Secret,
        deadline_s: float,
        observers_key: Secret | None = None,
    ) -> Handshake:
        """Begins the handshake as the acceptor; sends the challenge."""
        handshake = cls(connection, key, deadline_s, is_dialler=False, observers_key=observers_key)
        handshake._challenge = secrets.token_bytes(NONCE_BYTES)
        challenge = _CHALLENGE.pack(_MAGIC, VERSION, handshake._challenge)
        connection.settimeout(handshake._remaining_s())
        connection.sendall(b"".join(encode_frame(Kind.CHALLENGE, 0, 0, challenge)))
        return handshake

    def send(self, kind: Kind, greeting: Greeting, descriptors: Sequence[int] = ()) -> None:
        """Writes ``greeting`` as one frame; descriptors go along over a Unix socket only.

        Where the system refuses to pass descriptors, the greeting goes without them.
        """
        text = json.dumps(asdict(greeting)).encode()
        opening = self._answer if kind == Kind.HELLO else b""
        proof = self._key.sign(*self._signed(0, kind, text))
        data = b"".join(encode_frame(kind, 0, 0, proof + opening + text))
        self._connection.settimeout(self._remaining_s())
        if descriptors:
            with contextlib.suppress(OSError):  # Another error recurs below.
                data = data[socket.send_fds(self._connection, [data], descriptors) :]
        if data:  # Else the peer may have everything and be gone, which is no error here.
            self._connection.sendall(data)

    def receive(self, kind: Kind, descriptors: list[int] | None = None) -> Greeting:
        """Reads the other side's greeting and checks its proof.

        Reads no byte past the greeting, so that a parser can take over afterwards.

        Args:
            kind: The expected kind of greeting.
            descriptors: Extended with the descriptors that come with the greeting, if any, even if
                an error is raised; the caller must close them. None if none are expected.

        Raises:
            NotProven: The peer does not prove that it belongs to this run, or rejects our proof.
            ProtocolError: The data is not a valid greeting.
            TimeoutError: The greeting did not arrive in time.
            OSError: The connection ended.
        """
        data = self._receive_frame(kind, LIMIT_BYTES, descriptors)
        proof, text = data[:PROOF_BYTES], data[PROOF_BYTES:]
        if kind == Kind.HELLO:
            self._answer, text = text[:NONCE_BYTES], text[NONCE_BYTES:]
        signed = self._signed(1, kind, text)
        if not self._key.verify(proof, *signed) and not self._is_observers(proof, signed):
            raise NotProven("the other side has another secret, or belongs to another run")
        return _decode(text)

    def _is_observers(self, proof: bytes, signed: tuple[bytes, ...]) -> bool:
        """Whether a proof was made with the key of observers, which then is that of both sides."""
        key, self._observers_key = self._observers_key, None
        if key is None or not key.verify(proof, *signed):
            return False
        self._key, self.is_observer = key, True
        return True

    def refuse_proof(self) -> None:
        """Tells a dialler that its proof failed, and nothing else."""
        self._connection.sendall(b"".join(encode_frame(Kind.GOODBYE, 0, 0, b"")))

    def _signed(self, side: int, kind: Kind, text: bytes) -> tuple[bytes, ...]:
        """Returns the fields that the proof of a side's next greeting covers."""
        count = self._counts[side]
        self._counts[side] += 1
        place = bytes((kind, count))
        return self._roles[side], self._challenge, self._answer, place, text

    def _receive_frame(
        self, kind: Kind, limit_bytes: int, descriptors: list[int] | None = None
    ) -> bytes:
        header = self._receive_exactly(HEADER.size, descriptors)
        received_kind, _, buffers, size, _ = HEADER.unpack(header)
        if received_kind == Kind.GOODBYE and not buffers and not size:
            raise NotProven("it does not take this worker's proof: another secret, or another run")
        if kind == Kind.HELLO and received_kind == Kind.VOUCHER and self._may_skip_voucher:
            # Whoever accepted the connection has looked at it.
            self._may_skip_voucher = False
            if not buffers and size <= VOUCHER_LIMIT_BYTES:
                self._receive_exactly(size)
                return self._receive_frame(kind, limit_bytes, descriptors)
        if received_kind != kind or buffers or size > limit_bytes:
            raise ProtocolError("the other side does not speak Weft's protocol")
        return self._receive_exactly(size)

    def _receive_exactly(self, size_bytes: int, descriptors: list[int] | None = None) -> bytes:
        connection, data = self._connection, bytearray()
        while len(data) < size_bytes:
            connection.settimeout(self._remaining_s())
            missing = size_bytes - len(data)
            if descriptors is None or connection.family != socket.AF_UNIX:
                part = connection.recv(missing)
            else:
                part = _receive_with_descriptor(connection, missing, descriptors)
            if not part:
                raise ConnectionError("end of file during the greeting")
            data += part
        return bytes(data)

    def _remaining_s(self) -> float:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the greeting took too long")
        return remaining_s


def _decode(text: bytes) -> Greeting:
    try:
        greeting = Greeting(**json.loads(text))
        is_sound = type(greeting.worker) is int and isinstance(greeting.facts, dict)
        if not is_sound or not isinstance(greeting.refusal, str):
            raise TypeError("a field has the wrong type")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the greeting is malformed: {error}") from error
    return greeting


def _receive_with_descriptor(
    connection: socket.socket, size_bytes: int, descriptors: list[int]
) -> bytes:
    # Not socket.recv_fds, which does not pass the flag on.
    part, ancillary, _, _ = connection.recvmsg(
        size_bytes, socket.CMSG_LEN(_MOST_DESCRIPTORS * _DESCRIPTOR.size), _CLOSE_ON_EXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += [number for (number,) in _DESCRIPTOR.iter_unpack(data)]
    return part


NUMBER_BYTES = VOUCHER_PROOF_BYTES = 16
VOUCHER_LIMIT_BYTES = 256
_LOOK_BYTES = 4096
"""A voucher is among the first so many bytes of a connection."""
_SUFFIX = "voucher.weft"
_FORM = re.compile(rb"([0-9a-f]{32})\.([0-9a-f]{32})\.voucher\.weft")


def new_voucher(key: Secret, to: int) -> str:
    """Returns a voucher for one connection, in the form of a host name.

    Args:
        key: The key that both sides have.
        to: The id of the worker that is dialled.
    """
    number = secrets.token_bytes(NUMBER_BYTES)
    return f"{number.hex()}.{_proof(key, to, number).hex()}.{_SUFFIX}"


def frame_with(voucher: str) -> bytes:
    """Returns the frame that brings a voucher where there is no TLS."""
    return b"".join(encode_frame(Kind.VOUCHER, 0, 0, voucher.encode()))


def look_for_number(connection: socket.socket, key: Secret, me: int) -> bytes | None:
    """Returns the number of a valid voucher among the bytes that have arrived; None without one.

    The bytes stay there to be read. Never waits and never raises, provided that no other thread
    reads the connection: on a connection that has ended, there is no voucher.

    Args:
        connection: The connection, without TLS around it.
        key: The key that both sides have.
        me: The id of this worker.
    """
    with contextlib.suppress(OSError, ValueError):  # Ended, or closed.
        arrived = select.poll()
        arrived.register(connection, select.POLLIN)
        # Asked first: with a timeout set, the socket would wait whatever the flags are.
        if arrived.poll(0):
            return number_in(connection.recv(_LOOK_BYTES, socket.MSG_PEEK), key, me)
    return None


def number_in(data: bytes, key: Secret, me: int) -> bytes | None:
    """Returns the number of the first voucher in ``data`` if it is valid, else None."""
    found = _FORM.search(data)
    if found is None:
        return None
    number, proof = (bytes.fromhex(text.decode()) for text in found.groups())
    # Not ``verify``, which compares whole signatures.
    return number if secrets.compare_digest(proof, _proof(key, me, number)) else None


def _proof(key: Secret, to: int, number: bytes) -> bytes:
    return key.sign(b"voucher", str(to).encode(), number)[:VOUCHER_PROOF_BYTES]


_CREDENTIALS = struct.Struct("iII")
_WORD = struct.Struct("=I")
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"
_NO_PROCESS = "0"
"""Inode of a connection that no process has, or has accepted; the table does not tell its user."""
_LOOKS = 10
"""Reads of the table, which is not a snapshot: a read may miss an entry while others connect."""


def check_user(connection: socket.socket) -> None:
    """Checks that this user, or root, has the other end of ``connection``.

    A TCP connection must have been accepted by now.

    Raises:
        ProtocolError: Another user has it.
        ConnectionError: The kernel does not name the user; a later attempt may succeed.
    """
    user = user_of(connection)
    if user is None:
        raise ConnectionError("without a secret, it must be known which user is at the other end")
    if user not in (0, os.geteuid()):
        raise ProtocolError(
            f"user {user} is at the other end, this worker is of user {os.geteuid()}; without a "
            "secret, workers talk to those of the same user only"
        )


def user_of(connection: socket.socket) -> int | None:
    """Returns the user of this machine at the other end; None if unknown.

    For a dialled Unix socket, that is the listener's user.
    """
    if connection.family != socket.AF_UNIX:
        return _user_of_tcp(connection)
    return credentials_of(connection)[1]


def credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """Returns the process, the user and the group at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(data)
    return process, user, group


def _user_of_tcp(connection: socket.socket) -> int | None:
    # The entry of the other end, which has its own address first.
    theirs = _written(connection.getpeername()), _written(connection.getsockname())
    for _ in range(_LOOKS):
        for local, remote, user in _connections():
            if (local, remote) in zip(*theirs, strict=True):
                return user
    return None


def _connections() -> Iterator[tuple[str, str, int]]:
    """Yields both ends and the user of each connection that a process has."""
    for table in _TABLES:
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    _, local, remote, state, *_, user, _, inode = line.split()[:10]
                    if state == _ESTABLISHED and inode != _NO_PROCESS:
                        yield local, remote, int(user)
        except FileNotFoundError:
            continue  # This machine has no IPv6, or no such table.


def _written(endpoint: tuple[str, int]) -> tuple[str, str]:
    """Returns an endpoint as the IPv4 table and as the IPv6 table write it."""
    host, port = endpoint[:2]
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", address)
    short = "" if mapped is None or mapped.version == 6 else _hexadecimal(mapped.packed)
    long = address if address.version == 6 else ipaddress.ip_address(f"::ffff:{address}")
    return f"{short}:{port:04X}", f"{_hexadecimal(long.packed)}:{port:04X}"


def _hexadecimal(packed: bytes) -> str:
    return "".join(f"{word:08X}" for (word,) in _WORD.iter_unpack(packed))
