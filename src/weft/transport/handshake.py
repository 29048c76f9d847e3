"""The first frame each way on a new connection: who is there, and what it can do.

The texts are JSON: nothing is unpickled before both sides know each other. Both sides prove
that they belong to the same run by a token that only members of the group have read.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.errors import ProtocolError
from weft.wire.frames import HEADER, encode_frame
from weft.wire.messages import Kind

VERSION = 1
_LIMIT_BYTES = 1 << 20
_DESCRIPTOR = struct.Struct("i")
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What one side says of itself.

    Attributes:
        worker: Its rank.
        token: The secret of this run.
        refusal: Empty if the connection is welcome, else why it is not.
        facts: Whatever the channels want to know of each other.
        version: Version of the protocol it speaks.
    """

    worker: int
    token: str
    refusal: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION


def send_greeting(
    connection: socket.socket, kind: Kind, greeting: Greeting, descriptor: int | None = None
) -> None:
    """Writes ``greeting`` as one frame; with a descriptor, which takes a Unix socket."""
    data = b"".join(encode_frame(kind, 0, 0, json.dumps(asdict(greeting)).encode()))
    if descriptor is not None:
        data = data[socket.send_fds(connection, [data], [descriptor]) :]
    connection.sendall(data)


def decode_greeting(data: bytes, token: str) -> Greeting:
    """Reads a greeting and checks that it belongs to this run; raises ProtocolError if not."""
    try:
        greeting = Greeting(**json.loads(data))
        token_told = greeting.token.encode()
        if type(greeting.worker) is not int or not isinstance(greeting.facts, dict):
            raise TypeError("a field has the wrong type")
    # RecursionError: strangers may nest brackets as deep as they like.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the greeting makes no sense: {error}") from error
    if greeting.version != VERSION:
        raise ProtocolError(
            f"the other side speaks version {greeting.version} of the protocol, this one {VERSION};"
            " install the same Weft everywhere"
        )
    if not hmac.compare_digest(token_told, token.encode()):
        raise ProtocolError("the other side belongs to another run")
    return greeting


def receive_greeting(
    connection: socket.socket,
    kind: Kind,
    token: str,
    timeout_s: float,
    descriptors: list[int] | None = None,
) -> Greeting:
    """Reads the other side's greeting and checks that it belongs to this run.

    Reads not a byte past the greeting, so that a parser can take over afterwards.

    Args:
        connection: A connected socket; its timeout is changed.
        kind: What kind of greeting is expected.
        token: The secret of this run.
        timeout_s: Bound of the wait, in seconds.
        descriptors: Takes the descriptor that comes with the greeting, if one does, also where
            an error is raised; it is the caller's to close. None: there is to be none.

    Raises:
        ProtocolError: It is no greeting, of another version, or of another run.
        OSError: Nothing came within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    received_kind, _, buffers, size, _ = HEADER.unpack(
        _receive_exactly(connection, HEADER.size, deadline, descriptors)
    )
    if received_kind != kind or buffers or size > _LIMIT_BYTES:
        raise ProtocolError("the other side does not speak Weft's protocol")
    return decode_greeting(_receive_exactly(connection, size, deadline), token)


def _receive_exactly(
    connection: socket.socket,
    size_bytes: int,
    deadline: float,
    descriptors: list[int] | None = None,
) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the greeting took too long")
        connection.settimeout(remaining_s)
        missing = size_bytes - len(data)
        if descriptors is None or connection.family != socket.AF_UNIX:
            part = connection.recv(missing)
        else:
            part = _receive_with_descriptor(connection, missing, descriptors)
        if not part:
            raise ConnectionError("end of file during the greeting")
        data += part
    return bytes(data)


def _receive_with_descriptor(
    connection: socket.socket, size_bytes: int, descriptors: list[int]
) -> bytes:
    # Not socket.recv_fds: that one does not pass the flag on.
    part, ancillary, _, _ = connection.recvmsg(
        size_bytes, socket.CMSG_LEN(_DESCRIPTOR.size), _CLOSE_ON_EXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += [number for (number,) in _DESCRIPTOR.iter_unpack(data)]
    return part
