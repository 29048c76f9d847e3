"""Asks one worker, over a connection of its own for each question.

The greeting is that between workers, with the key of observers; see
``docs/protocols/observing.md``.

Also what this host knows of a worker's process that does not answer.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Greeting, Handshake, NotProven, check_user
from torchweft.engine.io.secure import TlsOptions, secure_client
from torchweft.engine.protocol.connecting import OBSERVER, Hello, Purpose
from torchweft.engine.wire.frames import HEADER
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.secret import Secret, key_of_observers

_STATES = {
    "T": "is stopped by a signal; kill -CONT {pid} lets it go on",
    "t": "is held by a debugger",
    "D": "waits for a device or a file system",
    "Z": "has ended",
}


def why_silent(failure: object, pid: int | None, timeout_s: float) -> str:
    """Returns why a worker did not answer, as the end of a sentence.

    Args:
        failure: The error with which the question ended.
        pid: The worker's process, if it is on this host.
        timeout_s: How long the question could take.
    """
    if isinstance(failure, NotProven):
        return "has another secret than this observer"
    if not isinstance(failure, TimeoutError):
        return f"cannot be asked: {failure}"
    told = f"does not answer within {timeout_s:g} s"
    if pid is None:
        return told
    return f"{told}: {told_of(pid)}"


def told_of(pid: int) -> str:
    """Returns why a process does not answer, as a sentence."""
    state = _state_of(pid)
    if state in _STATES:
        return f"its process {pid} {_STATES[state].format(pid=pid)}"
    return (
        f"code in C keeps the interpreter of process {pid} busy; kill -USR1 {pid} has it write its "
        "stacks to its standard error"
    )


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, by a signal or a debugger."""
    return _state_of(pid) in ("T", "t")


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


MOST_BYTES = 64 << 20
"""Largest answer accepted."""

_CREDENTIALS = struct.Struct("iII")


class Access(NamedTuple):
    """By what an observer proves itself.

    Attributes:
        secret: The secret of the group; None if it has none.
        tls: How connections over TCP are secured; None for no TLS.
    """

    secret: Secret | None = None
    tls: TlsOptions | None = None

    @classmethod
    def from_environment(cls) -> Access:
        """Returns the access that the environment describes, as for a worker.

        Raises:
            ConfigurationError: A variable, or a file that it names, does not work.
        """
        return cls(Secret.from_environment(), TlsOptions.from_environment())


def ask(address: str, question: str, access: Access, timeout_s: float) -> bytes:
    """Asks the worker that listens at an address; returns its answer.

    Raises:
        NotProven: The worker has another secret than ``access``, or only one of the two has one.
        ProtocolError: No worker of this version listens there; or without a secret, it is another
            user's.
        TimeoutError: It has not answered in time: it is stopped, or code in C keeps it busy.
        OSError: Nothing listens there.
    """
    deadline_s = time.monotonic() + timeout_s
    with _connected(address, access, deadline_s) as connection:
        key = key_of_observers(access.secret)
        handshake = Handshake.dial(connection, key, deadline_s)
        if access.secret is None:
            check_user(connection)
        facts = Hello(Purpose.OBSERVE, question=question).facts()
        handshake.send(Kind.HELLO, Greeting(OBSERVER, facts=facts))
        refusal = handshake.receive(Kind.WELCOME).refusal
        if refusal:
            raise ProtocolError(refusal)
        return _receive_answer(connection, deadline_s)


def process_at(address: str) -> int | None:
    """Returns the id of the process that listens at an address of this host.

    The kernel tells, so the process need not answer. None if nothing listens there, or if it is no
    Unix socket.
    """
    try:
        place = addresses.parse(address)
        if not isinstance(place, addresses.UnixAddress):
            return None
        with addresses.dial(place, 1.0) as connection:
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, ConfigurationError):
        return None
    process: int = _CREDENTIALS.unpack(data)[0]
    return process


@contextlib.contextmanager
def _connected(text: str, access: Access, deadline_s: float) -> Iterator[socket.socket]:
    address = addresses.parse(text)
    connection = addresses.dial(address, max(deadline_s - time.monotonic(), 0.01))
    if isinstance(address, addresses.TcpAddress) and (address.is_secure or access.tls is not None):
        if access.tls is None:
            connection.close()
            raise ConfigurationError(
                f"the worker at {text} wants TLS: set WEFT_TLS_CERT, WEFT_TLS_KEY and WEFT_TLS_CA "
                "as for a worker"
            )
        with contextlib.ExitStack() as on_error:
            on_error.callback(connection.close)
            secure = secure_client(connection, access.tls, max(deadline_s - time.monotonic(), 0.01))
            on_error.pop_all()
        connection = secure
    with connection:
        yield connection


def _receive_answer(connection: socket.socket, deadline_s: float) -> bytes:
    kind, _, buffers, size, _ = HEADER.unpack(_receive(connection, HEADER.size, deadline_s))
    if kind != Kind.REPORT or buffers or size > MOST_BYTES:
        raise ProtocolError("the worker does not answer as one of this version of Weft")
    return _receive(connection, size, deadline_s)


def _receive(connection: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer took too long")
        connection.settimeout(left_s)
        part = connection.recv(min(size_bytes - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the worker closed the connection before it had answered")
        data += part
    return bytes(data)
