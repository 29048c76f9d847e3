"""A socket loop in two processes: the limit of one stream of the kernel.

The caller writes a header and the tensors' memory with ``sendmsg``. The callee learns the sizes
from the header and receives the data with ``recv_into`` into memory that it has written before. It
answers with a byte, with the same bytes, or with their checksum. There are no threads and no
pickling, and the callee keeps its memory until another payload is announced.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Callable, Sequence

from benchmarks.frame.work import Work
from benchmarks.tensors.cargo import Cargo, checksum_of, new_tensors, view
from benchmarks.tensors.certificates import CA_VARIABLE, CERTIFICATE_VARIABLE, LOOPBACK
from benchmarks.tensors.payloads import MEASURED, Payload

ADDRESS_VARIABLE = "BENCHMARK_ADDRESS"
PORT = struct.Struct("<H")

TAKE, ECHO, FINGERPRINT = range(3)
HEADER = struct.Struct("<BIQ")  # requested answer, number of tensors, bytes of each
CHECKSUM = struct.Struct("<I")
DONE = b"."


class SocketSender:
    """Sends payloads to ``serve`` at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._cargo = Cargo()
        self._views: list[memoryview] = []
        self._returned: list[memoryview] = []

    def works(self) -> dict[str, Work]:
        return {payload.name: self._work(payload) for payload in MEASURED}

    def _work(self, payload: Payload) -> Work:
        runs: dict[str, Callable[[], object]] = {
            "one way": lambda: self._send_overlapping(payload),
            "echo": lambda: self._send_and_receive(payload),
            "in flight": lambda: self._send_overlapping(payload),
        }
        return Work(runs[payload.way], payload.overlapping, lambda: self._load(payload))

    def _send_overlapping(self, payload: Payload) -> None:
        for _ in range(payload.overlapping):
            self._send(payload, TAKE)
        receive(self._connection, len(DONE) * payload.overlapping)

    def _send_and_receive(self, payload: Payload) -> None:
        self._send(payload, ECHO)
        receive_into(self._connection, self._returned)

    def _send(self, payload: Payload, wanted: int) -> None:
        header = HEADER.pack(wanted, payload.tensors, payload.size_bytes)
        send(self._connection, [memoryview(header), *self._views])

    def _load(self, payload: Payload) -> None:
        if self._cargo.load(payload):
            self._returned = []
            self._views = [view(tensor) for tensor in self._cargo.tensors]
            if payload.way == "echo":
                self._returned = warm_views(payload.tensors, payload.size_bytes)
            self._cargo.prove(lambda: self._transfer(payload))

    def _transfer(self, payload: Payload) -> int:
        if payload.way == "echo":
            self._send_and_receive(payload)
            return checksum_of(self._returned)
        self._send(payload, FINGERPRINT)
        checksum: int = CHECKSUM.unpack(receive(self._connection, CHECKSUM.size))[0]
        return checksum


def serve(connection: socket.socket) -> None:
    """Receives payloads on ``connection``, and answers, until it is closed."""
    shape: tuple[int, int] = (0, 0)
    views: list[memoryview] = []
    while header := receive(connection, HEADER.size):
        wanted, *announced = HEADER.unpack(header)
        if (announced[0], announced[1]) != shape:
            views = []  # release first: two payloads of 1 GiB may not fit
            shape = (announced[0], announced[1])
            views = warm_views(*shape)
        receive_into(connection, views)
        if wanted == FINGERPRINT:
            connection.sendall(CHECKSUM.pack(checksum_of(views)))
        else:
            send(connection, views if wanted == ECHO else [memoryview(DONE)])


def unix_socket_works(connections: list[socket.socket]) -> dict[str, Work]:
    """Returns the works of a Unix socket with the kernel's default options."""
    return SocketSender(connections[0]).works()


serve_unix_socket = serve


def tcp_socket_works(connections: list[socket.socket]) -> dict[str, Work]:
    """Returns the works of a TCP connection, whose port comes over a Unix socket."""
    return SocketSender(_dialled(connections[0])).works()


def serve_tcp_socket(connection: socket.socket) -> None:
    """Serves the other end of ``tcp_socket_works``."""
    with _accepted(connection) as accepted:
        serve(accepted)


def tls_socket_works(connections: list[socket.socket]) -> dict[str, Work]:
    """Returns the works of a TCP connection under TLS 1.3, by Python's ``ssl``."""
    context = ssl.create_default_context(cafile=os.environ[CA_VARIABLE])
    dialled = context.wrap_socket(_dialled(connections[0]), server_hostname=_address())
    return SocketSender(dialled).works()


def serve_tls_socket(connection: socket.socket) -> None:
    """Serves the other end of ``tls_socket_works``."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(os.environ[CERTIFICATE_VARIABLE])
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with context.wrap_socket(_accepted(connection), server_side=True) as accepted:
        serve(accepted)


def _dialled(messenger: socket.socket) -> socket.socket:
    port = PORT.unpack(receive(messenger, PORT.size))[0]
    return _tuned(socket.create_connection((_address(), port)))


def _accepted(messenger: socket.socket) -> socket.socket:
    with socket.create_server((_address(), 0)) as listener:
        messenger.sendall(PORT.pack(listener.getsockname()[1]))
        return _tuned(listener.accept()[0])


def _address() -> str:
    return os.environ.get(ADDRESS_VARIABLE, LOOPBACK)


def _tuned(connection: socket.socket) -> socket.socket:
    """Sets favourable options: over loopback, a congestion control that does not pace."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _address() == LOOPBACK:
        with contextlib.suppress(OSError, AttributeError):  # without Reno, the system's own
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return connection


def send(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Writes all ``views``; without TLS in as few system calls as the kernel allows."""
    if isinstance(connection, ssl.SSLSocket):  # It has no ``sendmsg``.
        for one in views:
            connection.sendall(one)
        return
    rest = list(views)
    while rest:
        sent = connection.sendmsg(rest)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][sent:]


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fills all ``views``; raises ConnectionError if the other end closes before."""
    for one in views:
        rest = one
        while rest:
            received = connection.recv_into(rest)
            if not received:
                raise ConnectionError("the other end has closed within a payload")
            rest = rest[received:]


def receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Returns ``size_bytes`` bytes, or no bytes if the other end closes before."""
    data = b""
    while len(data) < size_bytes:
        part = connection.recv(size_bytes - len(data))
        if not part:
            return b""
        data += part
    return data


def warm_views(count: int, size_bytes: int) -> list[memoryview]:
    """Returns the memory of new tensors that have been written."""
    return [view(tensor) for tensor in new_tensors(count, size_bytes)]
