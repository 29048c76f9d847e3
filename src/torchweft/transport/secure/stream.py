"""One TLS connection without a socket: ciphertext in and out, plaintext in and out.

TLS failures become messages that name the cause and a remedy.
"""

from __future__ import annotations

import ssl
from _thread import allocate_lock
from collections.abc import Iterable
from typing import Any

from torchweft.errors import TlsError
from torchweft.wire.frames import Buffer

_ALERT = "_ALERT_"

_PLAIN = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
_OLD = frozenset(
    {
        "UNSUPPORTED_PROTOCOL",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "VERSION_TOO_LOW",
        "NO_PROTOCOLS_AVAILABLE",
    }
)

_SAME_AUTHORITY = "the certificates of all workers must be signed by the authorities in WEFT_TLS_CA"
BOTH_SIDES = "set up TLS on every worker, or on none"
ENDED_HERE = "this side has ended the TLS connection"
_RENEW = "renew that certificate, or set the clock of the host that refuses it"
_NEW_ENOUGH = "Weft speaks TLS 1.3 only; OpenSSL has it from 1.1.1 on"
_BRING_ONE = "give every worker a certificate (WEFT_TLS_CERT), or set WEFT_TLS_MUTUAL=0"


class TlsStream:
    """The TLS state of one connection. Thread-safe: a call waits for nothing but other calls.

    Args:
        context: This side's OpenSSL context.
        is_server: Whether this side is the acceptor.
        server_name: The name in the dialler's first message; empty for none.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool, server_name: str = "") -> None:
        self.has_ended = False
        """Whether the peer has announced that it sends nothing more."""
        self.is_dry = True
        """Whether nothing can be decrypted before more is fed."""
        self.has_output = False
        """Whether reading has caused output that must be sent."""
        self._lock = allocate_lock()
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, is_server, server_name or None)
        self._failure = ""
        self._has_said_farewell = False

    def shake_hands(self) -> bool:
        """Continues the handshake; returns False if it needs more input from the peer.

        Raises:
            ssl.SSLError: It failed; the output to be sent may tell the peer why.
        """
        with self._lock:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            # Data may have arrived along with the last message of the handshake.
            self.is_dry = not self._arrived.pending
            return True

    @property
    def protocol(self) -> str | None:
        """The protocol over TLS that both sides have agreed on."""
        return self._tls.selected_alpn_protocol()

    def certificate_names(self) -> list[str]:
        """Returns the names and addresses in the peer's verified certificate."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        names = certificate.get("subjectAltName", ())
        return [name for kind, name in names if kind in ("DNS", "IP Address")]

    def feed(self, ciphertext: Buffer) -> None:
        """Adds received ciphertext."""
        with self._lock:
            self._arrived.write(ciphertext)
            self.is_dry = False

    def take(self) -> bytes:
        """Returns the ciphertext to be sent; empty if there is none."""
        with self._lock:
            self.has_output = False
            return self._leaving.read()

    def encrypt(self, plaintext: Buffer) -> None:
        """Encrypts all of ``plaintext``, which must not be empty, for ``take``.

        Raises:
            ConnectionError: This side has said farewell, or the connection broke.
        """
        with self._lock:
            try:
                size = self._tls.write(plaintext)
                while size < len(plaintext):
                    size += self._tls.write(memoryview(plaintext)[size:])
            except ssl.SSLError as error:
                raise broken(error) from error

    def decrypt_into(self, spaces: Iterable[memoryview]) -> int:
        """Fills ``spaces`` with plaintext, in order; returns how many bytes, 0 if there are none.

        Raises:
            ConnectionError: The received data is not what the peer sent.
        """
        with self._lock:
            total = 0
            for space in spaces:
                size = self._fill(space)
                total += size
                if size < len(space):
                    break
            self.has_output = bool(self._leaving.pending)
        if self._failure and not total:
            raise ConnectionResetError(self._failure)
        return total

    def _fill(self, space: memoryview) -> int:
        size, wanted = 0, len(space)
        try:
            while size < wanted and not self.is_dry:
                # Reads one record at most. With a buffer, it returns the number of bytes.
                rest = space[size:] if size else space
                count: int = self._tls.read(wanted - size, rest)  # type: ignore[assignment, arg-type, unused-ignore]
                size += count
                if not count:
                    self.has_ended = self.is_dry = True
                elif not self._tls.pending() and not self._arrived.pending:
                    self.is_dry = True  # Cheaper than waiting for the exception.
        except ssl.SSLWantReadError:
            self.is_dry = True
        except ssl.SSLZeroReturnError:
            self.has_ended = self.is_dry = True
        except ssl.SSLError as error:
            # Data decrypted before the failure is valid, and is returned first.
            self._failure = ENDED_HERE if self._has_said_farewell else str(broken(error))
        return size

    def say_farewell(self) -> None:
        """Makes the message that this side sends nothing more."""
        with self._lock:
            self._has_said_farewell = True
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # It waits for the peer's farewell, or there is no peer to tell.


def refusal(error: ssl.SSLError, peer: str) -> TlsError:
    """Returns the error for a failed handshake."""
    reason, advice = _explain(error)
    return tls_error(peer, reason, advice)


def tls_error(peer: str, reason: str, advice: str) -> TlsError:
    """Returns the error for a handshake that failed for ``reason``."""
    return TlsError(f"no TLS connection with {peer}: {reason}; {advice}", peer=peer, reason=reason)


def trust_advice(problem: str) -> str:
    """Returns the advice where one side does not trust the other, in OpenSSL's words."""
    is_of_time = "expired" in problem or "not yet valid" in problem
    return _RENEW if is_of_time else _SAME_AUTHORITY


def broken(error: ssl.SSLError) -> ConnectionError:
    """Returns the error for a failure of an established connection."""
    reason = _reason_of(error)
    if reason == "PROTOCOL_IS_SHUTDOWN":
        return BrokenPipeError(ENDED_HERE)
    if _ALERT in reason:
        return ConnectionResetError(f"the other side ended TLS: {_plain_words(error)}")
    return ConnectionResetError(
        f"what arrived is not what the other side encrypted: {_plain_words(error)}"
    )


def _explain(error: ssl.SSLError) -> tuple[str, str]:
    reason = _reason_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"this side does not trust its certificate: {error.verify_message}"
        return problem, trust_advice(problem)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has shown no certificate", _BRING_ONE
    if reason in _OLD:
        return "it speaks no TLS that is new enough", _NEW_ENOUGH
    if reason in _PLAIN:
        return "it does not speak TLS", BOTH_SIDES
    if _ALERT in reason:
        problem = f"it refused: {_plain_words(error)}"
        return problem, trust_advice(problem)
    return _plain_words(error), BOTH_SIDES


def _reason_of(error: ssl.SSLError) -> str:
    """Returns OpenSSL's name for the failure; empty if it has none."""
    return getattr(error, "reason", None) or ""


def _plain_words(error: ssl.SSLError) -> str:
    """Returns ``unknown ca`` for ``TLSV1_ALERT_UNKNOWN_CA``."""
    reason = _reason_of(error)
    return reason.rpartition(_ALERT)[2].replace("_", " ").lower() if reason else str(error)
