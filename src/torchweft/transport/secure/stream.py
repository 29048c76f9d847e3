"""One TLS connection without a socket: ciphertext in and out, plaintext in and out."""

from __future__ import annotations

import ssl
from _thread import allocate_lock
from collections.abc import Iterable
from typing import Any

from torchweft.transport.secure.refusals import ENDED_HERE, broken
from torchweft.wire.frames import Buffer


class TlsStream:
    """The TLS of one connection. Thread-safe: no call waits for anything but another one.

    Args:
        context: Settings of this side.
        is_server: Whether this side was connected to.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.has_ended = False
        """Whether the other side has said that nothing more comes."""
        self.is_dry = True
        """Whether nothing can be decrypted before more has been fed."""
        self.has_output = False
        """Whether reading has given rise to something to be sent."""
        self._lock = allocate_lock()
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
        self._failure = ""
        self._has_said_farewell = False

    def shake_hands(self) -> bool:
        """Goes on with the handshake; returns whether it is done, else needs more of the other's.

        Raises:
            ssl.SSLError: It failed; what is to be sent may tell the other side why.
        """
        with self._lock:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            # What came along with the last message of the handshake.
            self.is_dry = not self._arrived.pending
            return True

    @property
    def protocol(self) -> str | None:
        """What both sides have agreed to speak over TLS."""
        return self._tls.selected_alpn_protocol()

    def certificate_names(self) -> list[str]:
        """Returns the names and addresses that the other side's verified certificate is for."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        names = certificate.get("subjectAltName", ())
        return [name for kind, name in names if kind in ("DNS", "IP Address")]

    def feed(self, ciphertext: Buffer) -> None:
        """Takes what has arrived."""
        with self._lock:
            self._arrived.write(ciphertext)
            self.is_dry = False

    def take(self) -> bytes:
        """Returns what is to be sent; nothing if there is none."""
        with self._lock:
            self.has_output = False
            return self._leaving.read()

    def encrypt(self, plaintext: Buffer) -> None:
        """Makes ciphertext, for ``take``, of all of ``plaintext``, which must not be empty.

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
            ConnectionError: What has arrived is not what the other side sent.
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
                # One record at most. With a buffer, it returns how much is in it.
                rest = space[size:] if size else space
                count: int = self._tls.read(wanted - size, rest)  # type: ignore[assignment, arg-type, unused-ignore]
                size += count
                if not count:
                    self.has_ended = self.is_dry = True
                elif not self._tls.pending() and not self._arrived.pending:
                    self.is_dry = True  # Sooner said than by an exception.
        except ssl.SSLWantReadError:
            self.is_dry = True
        except ssl.SSLZeroReturnError:
            self.has_ended = self.is_dry = True
        except ssl.SSLError as error:
            # What was decrypted before is good, and comes first.
            self._failure = ENDED_HERE if self._has_said_farewell else str(broken(error))
        return size

    def say_farewell(self) -> None:
        """Makes the message that nothing more comes of this side."""
        with self._lock:
            self._has_said_farewell = True
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # It waits for the other side's farewell, or there is nobody to tell.
