"""The TLS options of a worker, and the OpenSSL contexts made from them.

Certificates that live for days are renewed while a training job runs for weeks, and a worker that
has lost a connection dials again. So before each handshake the files are checked, and read again
if they have changed. The previous contexts stay in force while the new files do not fit together:
a renewal writes one file after the other.

In the handshake both sides prove who they are, within a time limit. In TLS 1.3 the client is done
before the server has checked its certificate; it would learn of a refusal only at some later read.
So the server's first byte confirms acceptance: a connection that ``secure_client`` returns has been
accepted.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, cast

from torchweft import knobs
from torchweft.engine.io.secure.connection import (
    BOTH_SIDES,
    SecureConnection,
    TlsStream,
    refusal,
    tls_error,
    trust_advice,
)
from torchweft.errors import ConfigurationError, TlsError

_log = logging.getLogger("torchweft")

PROTOCOL = "weft"
"""The protocol that both sides announce: a certificate's key may serve other protocols, too."""

_IGNORE_CUT_OFF = getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)


class Files(NamedTuple):
    """Paths of PEM files."""

    certificate: str
    key: str
    ca: str


class ContextPair(NamedTuple):
    """The contexts for dialling and for accepting."""

    client: ssl.SSLContext
    server: ssl.SSLContext


class Contexts:
    """The contexts that are in force. Thread-safe.

    Args:
        files: The files, read when the contexts are first used.
        is_mutual: Whether a dialler must have a certificate.
    """

    def __init__(self, files: Files, *, is_mutual: bool) -> None:
        self._files = files
        self._is_mutual = is_mutual
        self._lock = threading.Lock()
        self._made: ContextPair | None = None
        self._made_from: list[tuple[int, ...]] = []

    def current(self) -> ContextPair:
        """Returns the contexts, remade if the files have changed.

        Raises:
            ConfigurationError: A file is missing or wrong, and was so from the beginning.
        """
        with self._lock:
            state = [_state(path) for path in self._files]
            if self._made is None:
                self._made, self._made_from = self._make(), state
            elif state != self._made_from:
                try:
                    self._made = self._make()
                except ConfigurationError as error:
                    _log.warning("the TLS files have changed and do not work: %s", error)
                self._made_from = state
            return self._made

    def check(self, name: str) -> None:
        """Performs a handshake in memory; raises ConfigurationError if it fails."""
        made = self.current()
        try:
            for stream in _shake_hands(made):
                if self._is_mutual or stream.certificate_names():
                    check_name(stream.certificate_names(), name)
        except (ssl.SSLError, ValueError) as error:
            problem = getattr(error, "verify_message", "") or str(error)
            raise ConfigurationError(
                f"a worker with the authorities of {self._files.ca!r} would not accept the "
                f"certificate {self._files.certificate!r}: {problem}"
            ) from error

    def _make(self) -> ContextPair:
        for path in self._files:
            _check_readable(path)
        return ContextPair(self._make_client(), self._make_server())

    def _make_client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Workers are trusted by their authority; an expected name is checked later, the same way
        # on both sides.
        context.check_hostname = False
        return self._load(context)

    def _make_server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED if self._is_mutual else ssl.CERT_NONE
        context.num_tickets = 0  # TLS is never resumed; only written data may be sent.
        return self._load(context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options &= ~_IGNORE_CUT_OFF
        context.set_alpn_protocols([PROTOCOL])
        files = self._files
        try:
            # Without a password callback OpenSSL would ask for one at the terminal.
            context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigurationError(_load_problem(error, files)) from error
        try:
            context.load_verify_locations(files.ca)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"the file {files.ca!r} has no certificate of an authority, in PEM"
            ) from error
        return context


def _load_problem(error: Exception, files: Files) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return f"the key in {files.key!r} is not that of the certificate in {files.certificate!r}"
    if not _holds(files.certificate, "CERTIFICATE"):
        return f"the file {files.certificate!r} has no certificate, in PEM"
    if not _holds(files.key, "PRIVATE KEY"):
        return f"the file {files.key!r} has no key, in PEM"
    if _holds(files.key, "ENCRYPTED"):
        return (
            f"the key in {files.key!r} has a passphrase; Weft has nobody to ask for it: remove it"
        )
    return f"certificate {files.certificate!r} with key {files.key!r} cannot be used: {error}"


def _holds(path: str, word: str) -> bool:
    with open(path, "rb") as file:
        return word.encode() in file.read()


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"cannot read the TLS file {path!r}: {error.strerror}") from None


def _state(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _shake_hands(contexts: ContextPair) -> tuple[TlsStream, TlsStream]:
    """Returns both sides of a connection in memory, after the handshake."""
    client = TlsStream(contexts.client, is_server=False)
    server = TlsStream(contexts.server, is_server=True)
    client_is_done = server_is_done = False
    while not (client_is_done and server_is_done):
        client_is_done = client_is_done or client.shake_hands()
        server.feed(client.take())
        server_is_done = server_is_done or server.shake_hands()
        client.feed(server.take())
    return client, server


@dataclass(frozen=True)
class TlsOptions:
    """TLS for the TCP connections of one worker.

    Every worker both listens and connects, so each has a certificate. A certificate signed by an
    authority in ``ca`` admits its holder: use an authority of your own, for this purpose only.
    With a public authority, any owner of a web site would be admitted, unless ``name`` is set.

    Attributes:
        certificate: File with this worker's certificate, then any intermediate certificates, in
            PEM.
        ca: File with the authorities that sign the certificates of all workers, in PEM.
        key: File with the certificate's key, in PEM, without a passphrase; empty if the
            certificate's file contains it.
        mutual: Whether a worker that connects to this worker must have a certificate, too.
        name: Name or IP address that the peer's certificate must be issued to, as subject
            alternative name and without wildcards; empty to accept any signed certificate.
    """

    certificate: str
    ca: str
    key: str = ""
    mutual: bool = True
    name: str = ""

    @classmethod
    def from_environment(cls) -> TlsOptions | None:
        """Returns the options from the ``WEFT_TLS_...`` variables; None without a file or name.

        Raises:
            ConfigurationError: They set some, but not both certificate and authorities.
        """
        certificate, key, ca, name = (knob.get() for knob in knobs.TLS_NAMES)
        if not (certificate or ca or key or name):
            return None
        for knob in (knobs.TLS_CERT, knobs.TLS_CA):
            if not knob.get():
                raise ConfigurationError(
                    f"some of WEFT_TLS_... is set, but {knob.variable} is not; TLS needs "
                    f"{knobs.TLS_CERT.variable} and {knobs.TLS_CA.variable}"
                )
        return cls(certificate, ca, key, bool(knobs.TLS_MUTUAL.get()), name)

    def check(self) -> None:
        """Checks that a worker with the same options would admit this worker.

        Raises:
            ConfigurationError: A file is missing or wrong, or the certificate has expired, is from
                another authority, or for another name.
        """
        self.contexts.check(self.name)

    def client_context(self) -> ssl.SSLContext:
        """Returns the OpenSSL context for dialling, remade when a file has changed."""
        return self.contexts.current().client

    def server_context(self) -> ssl.SSLContext:
        """Returns the OpenSSL context for accepting, remade when a file has changed."""
        return self.contexts.current().server

    @functools.cached_property
    def contexts(self) -> Contexts:
        """The OpenSSL contexts, made when first used."""
        files = Files(self.certificate, self.key or self.certificate, self.ca)
        return Contexts(files, is_mutual=self.mutual)

    def __reduce__(self) -> tuple[object, ...]:
        # OpenSSL contexts stay in their process.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def check_name(names: Sequence[str], expected: str) -> None:
    """Raises ValueError unless ``expected`` is empty or one of ``names``.

    Only the same name matches: no wildcards, and an address in any notation.
    """
    if expected and _normal(expected) not in map(_normal, names):
        told = ", ".join(names) or "nobody"
        raise ValueError(f"it is made out to {told}, not to {expected!r}")


def _normal(name: str) -> object:
    try:
        return ipaddress.ip_address(name.strip())
    except ValueError:
        return name.lower().rstrip(".")


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
