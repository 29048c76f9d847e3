"""The TLS handshake: both sides prove who they are, within a time limit.

In TLS 1.3 the client is done before the server has checked its certificate; it would learn of a
refusal only at some later read. So the server's first byte confirms acceptance: a connection that
``secure_client`` returns has been accepted.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

from torchweft.errors import TlsError
from torchweft.transport.secure.connection import SecureConnection
from torchweft.transport.secure.options import PROTOCOL, TlsOptions, check_name
from torchweft.transport.secure.stream import (
    BOTH_SIDES,
    TlsStream,
    refusal,
    tls_error,
    trust_advice,
)

_RECEIVE_BYTES = 16 << 10
_HANDSHAKE_RECORD = 22
_ALERT_RECORD = 21
_ACCEPTED = b"\1"


def secure_client(
    connection: socket.socket, options: TlsOptions, timeout_s: float, server_name: str = ""
) -> socket.socket:
    """Performs the handshake as the dialler.

    Args:
        connection: A connected TCP socket. The result owns it; after an error, the caller does.
        options: Certificate and authorities.
        timeout_s: Bound of the whole handshake, in seconds.
        server_name: Sent unencrypted in the first message; empty for none. It does not select the
            certificate, nor is that checked against it.

    Returns:
        The connection, accepted by the other side, with the socket's previous timeout: a
        ``SecureConnection``, which can be used like a socket.

    Raises:
        TlsError: One side does not trust the other, or the peer does not speak TLS.
        TimeoutError: The handshake took too long.
        ConfigurationError: A file is missing or wrong.
    """
    stream = TlsStream(options.client_context(), is_server=False, server_name=server_name)
    handshake = _Handshake(connection, stream, options.name, timeout_s)
    return cast(socket.socket, handshake.run(_await_acceptance))


def secure_server(
    connection: socket.socket, options: TlsOptions, timeout_s: float
) -> socket.socket:
    """Performs the handshake as the acceptor; otherwise like ``secure_client``."""
    stream = TlsStream(options.server_context(), is_server=True)
    name = options.name if options.mutual else ""
    return cast(socket.socket, _Handshake(connection, stream, name, timeout_s).run(_accept))


class _Handshake:
    """One handshake. All its waits share one deadline."""

    def __init__(
        self, connection: socket.socket, stream: TlsStream, name: str, timeout_s: float
    ) -> None:
        self.stream = stream
        self._connection = connection
        self._name = name
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._peer = _peer_of(connection)
        self._has_received = False

    def run(self, finish: Callable[[_Handshake], None]) -> SecureConnection:
        timeout_before_s = self._connection.gettimeout()
        try:
            self._shake_hands()
            self._check_other_side()
            finish(self)
        except TlsError:
            raise
        except ssl.SSLError as error:
            self._send_alert()
            raise refusal(error, self._peer) from error
        except TimeoutError:
            raise TimeoutError(
                f"the TLS handshake with {self._peer} took longer than {self._timeout_s:.3g} s"
            ) from None
        except ConnectionError as error:
            raise self.error(str(error), f"{trust_advice(str(error))}; {BOTH_SIDES}") from error
        finally:
            with contextlib.suppress(OSError):  # Closed meanwhile.
                self._connection.settimeout(timeout_before_s)
        return SecureConnection(self._connection, self.stream)

    def error(self, reason: str, advice: str) -> TlsError:
        return tls_error(self._peer, reason, advice)

    def send(self) -> None:
        data = self.stream.take()
        if data:
            self._connection.settimeout(self._remaining_s())
            self._connection.sendall(data)

    def receive(self) -> None:
        self._connection.settimeout(self._remaining_s())
        data = self._connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection during the handshake")
        if not self._has_received and data[0] not in (_HANDSHAKE_RECORD, _ALERT_RECORD):
            raise self.error("it does not speak TLS", BOTH_SIDES)
        self._has_received = True
        self.stream.feed(data)

    def _shake_hands(self) -> None:
        while not self.stream.shake_hands():
            self.send()
            self.receive()
        self.send()

    def _check_other_side(self) -> None:
        if self.stream.protocol != PROTOCOL:
            raise self.error("it does not speak Weft's protocol", "check the address and port")
        try:
            check_name(self.stream.certificate_names(), self._name)
        except ValueError as problem:
            raise self.error(
                f"this side does not trust its certificate: {problem}",
                "see the name in the TLS options (WEFT_TLS_NAME)",
            ) from None

    def _send_alert(self) -> None:
        """Sends the alert with the cause, if the socket has room now."""
        with contextlib.suppress(OSError):
            self._connection.settimeout(0)
            self._connection.send(self.stream.take())

    def _remaining_s(self) -> float:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s


def _accept(handshake: _Handshake) -> None:
    handshake.stream.encrypt(_ACCEPTED)
    handshake.send()


def _await_acceptance(handshake: _Handshake) -> None:
    answer = memoryview(bytearray(len(_ACCEPTED)))
    while not handshake.stream.decrypt_into([answer]):
        if handshake.stream.has_ended:
            raise ConnectionResetError("it closed the connection during the handshake")
        handshake.receive()
    if answer != _ACCEPTED:
        raise handshake.error("it does not speak Weft's protocol", "check the address and port")


def _peer_of(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except (OSError, ValueError):
        return "a peer that has disconnected"
    return f"{host}:{port}"
