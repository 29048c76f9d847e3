"""The TLS options of a worker, and the OpenSSL contexts made from them.

Certificates that live for days are renewed while a training job runs for weeks, and a worker that
has lost a connection dials again. So before each handshake the files are checked, and read again
if they have changed. The previous contexts stay in force while the new files do not fit together:
a renewal writes one file after the other.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.errors import ConfigurationError

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
            for side in _shake_hands(made):
                if self._is_mutual or names_of(side):
                    check_name(names_of(side), name)
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


def _shake_hands(contexts: ContextPair) -> Sequence[ssl.SSLObject]:
    """Returns both sides of a connection in memory, after the handshake."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        contexts.client.wrap_bio(to_client, to_server),
        contexts.server.wrap_bio(to_server, to_client, server_side=True),
    )
    unfinished = list(sides)
    while unfinished:
        for side in list(unfinished):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                unfinished.remove(side)
    return sides


def names_of(tls: ssl.SSLObject | ssl.SSLSocket) -> list[str]:
    """Returns the names and addresses in the peer's verified certificate."""
    certificate: dict[str, Any] = tls.getpeercert() or {}
    names = certificate.get("subjectAltName", ())
    return [name for kind, name in names if kind in ("DNS", "IP Address")]


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
