"""One TLS connection without a socket: ciphertext in and out, plaintext in and out."""

from __future__ import annotations

import ssl
from _thread import allocate_lock
from collections.abc import Iterable
from typing import Any

from torchweft.transport.secure.refusals import ENDED_HERE, broken
from torchweft.wire.frames import Buffer


class TlsStream:
    """The TLS state of one connection. Thread-safe: a call waits for nothing but other calls.

    Args:
        context: This side's OpenSSL context.
        is_server: Whether this side is the acceptor.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.has_ended = False
        """Whether the peer has announced that it sends nothing more."""
        self.is_dry = True
        """Whether nothing can be decrypted before more is fed."""
        self.has_output = False
        """Whether reading has caused output that must be sent."""
        self._lock = allocate_lock()
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
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
