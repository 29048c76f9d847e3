"""A TCP connection under TLS, with the interface of a connected socket.

Differences from a socket:

- *Held back*. Encrypted bytes cannot be taken back, but the socket may have no room for all of the
  ciphertext. The writer must then call again, or the end of the ciphertext would never be sent. So
  the last byte of the plaintext is reported as not sent until all ciphertext is out. The writer,
  like every writer of a stream, continues with the first byte that was not reported as sent.
- *Pending*. Ciphertext is received in larger pieces than the reader has room for. A reader that
  waits for the descriptor must check ``pending`` first: ``epoll`` does not report what is already
  in memory.
- A receive that does not wait, or has ``SO_RCVTIMEO`` set, asks the socket once. If that does not
  complete a record, it finds nothing, as if nothing had arrived.

``TlsStream`` is one TLS connection without a socket: ciphertext in and out, plaintext in and out.
TLS failures become messages that name the cause and a remedy.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from _thread import allocate_lock
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchweft.closing import Closing
from torchweft.engine.wire.frames import Buffer
from torchweft.errors import NotSupported, TlsError

_DONTWAIT = socket.MSG_DONTWAIT
_RECORD_BYTES = 16 << 10
_PIECE_BYTES = 8 * _RECORD_BYTES
"""Bytes encrypted at once; other threads cannot decrypt meanwhile."""
_RECEIVE_BYTES = 128 << 10
_NOTHING = memoryview(b"")

CUT_OFF = "the connection was cut off: it ended without the other side's farewell"


class SecureConnection(Closing):
    """A TLS connection. Thread-safe for one reader, one writer and a thread that ends it.

    Args:
        connection: The connected socket; owned from here on.
        stream: The TLS stream, with the handshake done.
    """

    def __init__(self, connection: socket.socket, stream: TlsStream) -> None:
        self._socket = connection
        self._stream = stream
        self._writing = threading.Lock()
        self._unsent = _NOTHING
        self._held_back = -1
        """The byte that was encrypted and not reported as sent; -1 for none."""
        self._inbox = memoryview(bytearray(_RECEIVE_BYTES))
        self._has_tick = False
        self.family = connection.family
        self.settimeout(connection.gettimeout())

    # Writing

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Encrypts and sends; returns how many bytes are out (see *held back* above)."""
        return self.sendmsg((data,), (), flags)

    def sendmsg(
        self, parts: Iterable[Buffer], ancillary: Sequence[Any] = (), flags: int = 0
    ) -> int:
        """Like ``send``, for several byte buffers in order.

        Raises:
            BlockingIOError: Nothing could be sent without waiting.
            TimeoutError: Nothing could be sent within the timeout.
            ConnectionError: The connection has ended.
        """
        _check(flags, ancillary)
        with self._writing:
            return self._send(parts, flags, self._deadline(flags))

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Sends all of ``data``; the timeout bounds the whole call."""
        _check(flags)
        rest = memoryview(data)
        with self._writing:
            deadline_s = self._deadline(flags)
            while rest:
                rest = rest[self._send((rest,), flags, deadline_s) :]

    def _send(self, parts: Iterable[Buffer], flags: int, deadline_s: float | None) -> int:
        taken = 0
        if self._held_back >= 0 or self._unsent:
            if not self._push(flags, deadline_s):
                raise _nothing_done(deadline_s)
            if self._held_back >= 0:
                parts = self._behind_held_back(parts)
                taken = 1
        for piece in _pieces(parts):
            self._stream.encrypt(piece)
            taken += len(piece)
            if not self._push(flags, deadline_s):
                self._held_back = piece[-1]
                if taken == 1:
                    raise _nothing_done(deadline_s)
                return taken - 1
        return taken

    def _behind_held_back(self, parts: Iterable[Buffer]) -> list[Buffer]:
        """Returns ``parts`` without the held-back byte, which has been sent."""
        rest = [part for part in parts if len(part)]
        if not rest or rest[0][0] != self._held_back:
            raise BrokenPipeError("the writer did not go on where it had stopped")
        self._held_back = -1
        rest[0] = memoryview(rest[0])[1:]
        return rest

    def _push(self, flags: int, deadline_s: float | None) -> bool:
        """Sends all pending ciphertext; returns False if some is left."""
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._stream.take())
                if not self._unsent:
                    return True
            try:
                size = self._socket.send(self._unsent, flags)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline_s):
                    return False
                continue
            self._unsent = self._unsent[size:]

    def _push_aside(self) -> None:
        """Sends output that reading has caused, if possible now; otherwise a later write does."""
        if self._writing.acquire(False):
            try:
                self._push(_DONTWAIT, None)
            except OSError:
                pass  # The next read or write reports it.
            finally:
                self._writing.release()

    # Reading

    @property
    def pending(self) -> bool:
        """Whether a receive may find something without asking the socket."""
        return not self._stream.is_dry

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receives and decrypts at most ``size`` bytes; returns none at the end."""
        space = bytearray(size)
        return bytes(memoryview(space)[: self.recv_into(space, 0, flags)])

    def recv_into(self, buffer: Buffer, size: int = 0, flags: int = 0) -> int:
        """Receives into ``buffer``; returns how many bytes, 0 at the end.

        Raises:
            BlockingIOError: Nothing can be received without waiting.
            TimeoutError: Nothing arrived within the timeout.
            ConnectionError: The connection has ended, or was cut off.
        """
        space = memoryview(buffer)
        return self._receive((space[:size] if size else space,), flags)

    def recvmsg_into(
        self, buffers: Iterable[Buffer], ancillary_size: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        """Like ``recv_into``, into several buffers in order."""
        _check(0, ancillary_size)
        return self._receive([memoryview(buffer) for buffer in buffers], flags), [], 0, None

    def _receive(self, spaces: Sequence[memoryview], flags: int) -> int:
        _check(flags)
        if not any(map(len, spaces)):
            return 0
        stream, deadline_s = self._stream, self._deadline(flags)
        asks_once = self._timeout_s == 0 or bool(flags) or self._has_tick
        is_asked = False
        while True:
            if not stream.is_dry:
                size = stream.decrypt_into(spaces)
                if stream.has_output:
                    self._push_aside()
                if size:
                    return size
            if stream.has_ended:
                return 0
            if is_asked and asks_once:
                raise BlockingIOError("no record is complete")
            self._receive_ciphertext(flags, deadline_s)
            is_asked = True

    def _receive_ciphertext(self, flags: int, deadline_s: float | None) -> None:
        # Checked even if data arrives: empty records may keep arriving for ever.
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise TimeoutError("timed out")
        try:
            size = self._socket.recv_into(self._inbox, 0, flags)
        except BlockingIOError:
            if deadline_s is None:
                raise
            if not self._wait(select.POLLIN, deadline_s):
                raise TimeoutError("timed out") from None
            return
        if not size:
            raise ConnectionResetError(CUT_OFF)
        self._stream.feed(self._inbox[:size])

    # Waiting

    def settimeout(self, timeout_s: float | None) -> None:
        """Bounds each later call; None for no bound, 0 for calls that never wait."""
        # With a bound the socket itself is non-blocking: two threads may wait, each its own time.
        self._socket.setblocking(timeout_s is None)
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        """Returns the value from ``settimeout``."""
        return self._timeout_s

    def setblocking(self, blocks: bool) -> None:
        """Makes later calls wait without bound, or not at all."""
        self.settimeout(None if blocks else 0.0)

    def _deadline(self, flags: int) -> float | None:
        return None if flags or not self._timeout_s else time.monotonic() + self._timeout_s

    def _wait(self, event: int, deadline_s: float | None) -> bool:
        """Waits for the socket until the deadline; returns whether it became ready."""
        if deadline_s is None:
            return False
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return False
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(remaining_s * 1e3))

    # The socket

    def fileno(self) -> int:
        """Returns the descriptor of the socket, to wait for; see ``pending``."""
        return self._socket.fileno()

    def dup(self) -> socket.socket:
        """Returns a second descriptor of the socket, to wait for only."""
        return self._socket.dup()

    def setsockopt(self, level: int, option: int, value: int | Buffer) -> None:
        """Sets an option of the socket."""
        self._socket.setsockopt(level, option, value)
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            self._has_tick = True

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        """Returns an option of the socket."""
        return self._socket.getsockopt(level, option, *size)

    def getsockname(self) -> Any:
        """Returns the address of this side."""
        return self._socket.getsockname()

    def getpeername(self) -> Any:
        """Returns the address of the other side."""
        return self._socket.getpeername()

    # The end

    def shutdown(self, how: int) -> None:
        """Ends the connection both ways; readers and writers notice at once. Never waits.

        Raises:
            NotSupported: ``how`` is not ``SHUT_RDWR``.
            OSError: It is not connected any more.
        """
        if how != socket.SHUT_RDWR:
            raise NotSupported("a TLS connection ends both ways at once: shutdown(SHUT_RDWR)")
        self._say_farewell()
        self._socket.shutdown(how)

    def close(self) -> None:
        """Ends the connection and frees its descriptor. Only when no thread uses it any more."""
        self._say_farewell()
        self._socket.close()

    def _say_farewell(self) -> None:
        """Tells the peer that it has received everything, if the socket has room now."""
        if self._held_back < 0 and self._writing.acquire(False):
            try:
                if self._push(_DONTWAIT, None):
                    self._stream.say_farewell()
                    self._push(_DONTWAIT, None)
            except OSError:
                pass  # The peer ended it first.
            finally:
                self._writing.release()


def _check(flags: int, ancillary: object = None) -> None:
    if flags & ~_DONTWAIT or ancillary:
        raise NotSupported(
            f"a TLS connection takes no flags but MSG_DONTWAIT (it was given {flags}), "
            "and nothing beside the bytes"
        )


def _nothing_done(deadline_s: float | None) -> OSError:
    return (
        BlockingIOError("the socket is full") if deadline_s is None else TimeoutError("timed out")
    )


def _pieces(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yields all bytes in order: small parts joined, large parts cut, no piece empty."""
    together: list[Buffer] = []
    together_bytes = 0
    for part in parts:
        size = len(part)
        if together_bytes + size <= _RECORD_BYTES:
            together.append(part)
            together_bytes += size
            continue
        if together_bytes:
            yield b"".join(together)
        together, together_bytes = [], 0
        if size <= _RECORD_BYTES:
            together, together_bytes = [part], size
            continue
        whole = memoryview(part)
        for start in range(0, size, _PIECE_BYTES):
            yield whole[start : start + _PIECE_BYTES]
    if together_bytes:
        yield together[0] if len(together) == 1 else b"".join(together)


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
