"""A TCP connection under TLS, with the interface of a connected socket; and its handshake.

``ssl.SSLSocket`` never waits here, and each call of it is made under a lock, because OpenSSL allows
one thread at a time. The waiting is done outside, so a reader and a writer do not hold each other
up. Differences from a plain socket:

- A writer whose data could not be sent must continue with the same bytes, as every writer of a
  stream does: OpenSSL has encrypted the first of them already.
- *Pending*. A reader that waits for the descriptor must check ``pending`` first: ``epoll`` does not
  report what is already decrypted.
- A receive that does not wait, or has ``SO_RCVTIMEO`` set, finds nothing unless a whole record
  arrives in time.

In the handshake both sides prove who they are, within a time limit. In TLS 1.3 the client is done
before the server has checked its certificate; it would learn of a refusal only at some later read.
So the server's first byte confirms acceptance: a connection that ``secure_client`` returns has been
accepted. TLS failures become messages that name the cause and a remedy.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import threading
import time
from _thread import allocate_lock
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torchweft.closing import Closing
from torchweft.engine.io.secure.options import PROTOCOL, TlsOptions, check_name, names_of
from torchweft.engine.wire.frames import Buffer
from torchweft.errors import TlsError

_RECORD_BYTES = 16 << 10
_ACCEPTED = b"\1"

CUT_OFF = "the connection was cut off: it ended without the other side's farewell"


class SecureConnection(Closing):
    """A TLS connection. Thread-safe for one reader, one writer and a thread that ends it.

    Args:
        connection: The connected socket; owned from here on.
        tls: The same connection under TLS, with the handshake done; owned from here on.
    """

    def __init__(self, connection: socket.socket, tls: ssl.SSLSocket) -> None:
        self._socket = connection
        self._tls = tls
        self._lock = allocate_lock()
        self._writing = threading.Lock()
        self._failure = ""
        self._tick_s = math.inf
        self._timeout_s = connection.gettimeout()
        self.family = connection.family
        tls.setblocking(False)
        connection.setblocking(False)

    # Writing

    def sendmsg(
        self, parts: Iterable[Buffer], ancillary: Sequence[Any] = (), flags: int = 0
    ) -> int:
        """Encrypts and sends byte buffers, in order; returns how many bytes are out.

        Args:
            parts: The buffers.
            ancillary: Is left out.
            flags: ``MSG_DONTWAIT``, or 0; so for all calls.

        Raises:
            BlockingIOError: Nothing could be sent without waiting.
            TimeoutError: Nothing could be sent within the timeout.
            ConnectionError: The connection has ended.
        """
        deadline_s = self._deadline_s(flags)
        sent = 0
        with self._writing:
            for piece in _pieces(parts):
                size = self._write(memoryview(piece), deadline_s)
                sent += size
                if size < len(piece):
                    if not sent:
                        raise self._nothing_done(flags)
                    break
        return sent

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Sends all of ``data``; the timeout bounds the whole call."""
        with self._writing:
            if self._write(memoryview(data), self._deadline_s(flags)) < len(data):
                raise self._nothing_done(flags)

    def _write(self, data: memoryview, deadline_s: float) -> int:
        """Sends until the deadline; returns how many bytes are out."""
        sent = 0
        while sent < len(data):
            try:
                with self._lock:
                    sent += self._tls.write(data[sent : sent + _RECORD_BYTES])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as wants:
                if not self._wait(wants, deadline_s):
                    break
            except (OSError, ValueError) as error:
                raise broken(error) from error
        return sent

    # Reading

    @property
    def pending(self) -> bool:
        """Whether a receive finds something without asking the socket."""
        with self._lock:
            return bool(self._tls.pending())

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
        return self._receive([memoryview(buffer) for buffer in buffers], flags), [], 0, None

    def _receive(self, spaces: Sequence[memoryview], flags: int) -> int:
        deadline_s = min(self._deadline_s(flags), time.monotonic() + self._tick_s)
        total = 0
        for space in spaces:
            while space:
                count = self._read(space, -math.inf if total else deadline_s)
                if count is None and not total:
                    raise self._nothing_received(flags)
                if not count:
                    return total
                total += count
                # A record that is not full is likely the last one that is there.
                if count < min(_RECORD_BYTES, len(space)):
                    return total
                space = space[count:]
        return total

    def _read(self, space: memoryview, deadline_s: float) -> int | None:
        """Fills a space from one record; returns 0 at the end, None if there is none in time."""
        while not self._failure:
            try:
                with self._lock:
                    # With a buffer, it returns the number of bytes.
                    return self._tls.read(len(space), space)  # type: ignore[return-value, arg-type, unused-ignore]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
                if not self._wait(wants, deadline_s):
                    return None
            except ssl.SSLZeroReturnError:
                return 0
            except (OSError, ValueError) as error:
                # What was decrypted before the failure is valid, and is returned first.
                self._failure = str(broken(error))
        return None

    def _nothing_received(self, flags: int) -> OSError:
        if self._failure:
            return ConnectionResetError(self._failure)
        if self._tick_s < math.inf and not self._timeout_s:
            return BlockingIOError("no record is complete")
        return self._nothing_done(flags)

    # Waiting

    def settimeout(self, timeout_s: float | None) -> None:
        """Bounds each later call; None for no bound, 0 for calls that never wait."""
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        """Returns the value from ``settimeout``."""
        return self._timeout_s

    def setblocking(self, blocks: bool) -> None:
        """Makes later calls wait without bound, or not at all."""
        self.settimeout(None if blocks else 0.0)

    def _deadline_s(self, flags: int) -> float:
        """Returns until when a call may wait; in the past if it may not."""
        if flags or self._timeout_s == 0:
            return -math.inf
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait(self, wants: ssl.SSLError, deadline_s: float) -> bool:
        """Waits for the socket until the deadline; returns whether it became ready."""
        # Checked even if data arrives: empty records may keep arriving for ever.
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        is_read = isinstance(wants, ssl.SSLWantReadError)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN if is_read else select.POLLOUT)
        return bool(poll.poll(None if math.isinf(left_s) else left_s * 1e3))

    def _nothing_done(self, flags: int) -> OSError:
        if flags or not self._timeout_s:
            return BlockingIOError("the socket is full, or no record is complete")
        return TimeoutError("timed out")

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
            seconds, microseconds = struct.unpack("ll", cast(bytes, value))
            self._tick_s = seconds + microseconds / 1e6

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
        """Ends the connection, always both ways; readers and writers notice at once. Never waits.

        Raises:
            OSError: It is not connected any more.
        """
        self._say_farewell()
        self._socket.shutdown(how)

    def close(self) -> None:
        """Ends the connection and frees its descriptors. Only when no thread uses it any more."""
        self._say_farewell()
        self._tls.close()
        self._socket.close()

    def _say_farewell(self) -> None:
        """Tells the peer that it has received everything, if the socket has room now."""
        # It waits for the peer's farewell, or there is no peer to tell; or a record is on its way,
        # and the peer has not received everything.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()


def _pieces(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yields all bytes in order: small parts joined, large parts as they are, no piece empty."""
    together = bytearray()
    for part in parts:
        if together and len(together) + len(part) > _RECORD_BYTES:
            yield together
            together = bytearray()
        if len(part) > _RECORD_BYTES:
            yield part
        else:
            together += part
    if together:
        yield together


# The handshake


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
    context, name = options.client_context(), options.name
    return _secure(connection, context, name, timeout_s, False, server_name or None)


def secure_server(
    connection: socket.socket, options: TlsOptions, timeout_s: float
) -> socket.socket:
    """Performs the handshake as the acceptor; otherwise like ``secure_client``."""
    name = options.name if options.mutual else ""
    return _secure(connection, options.server_context(), name, timeout_s, True, None)


def _secure(
    connection: socket.socket,
    context: ssl.SSLContext,
    name: str,
    timeout_s: float,
    is_server: bool,
    server_name: str | None,
) -> socket.socket:
    peer, timeout_before_s = _peer_of(connection), connection.gettimeout()
    try:
        tls = context.wrap_socket(
            connection.dup(),
            is_server,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
            server_hostname=server_name,
        )
        try:
            _shake_hands(tls, name, peer, time.monotonic() + timeout_s, is_server=is_server)
        except BaseException:
            tls.close()
            raise
    except TlsError:
        raise
    except TimeoutError:
        raise TimeoutError(
            f"the TLS handshake with {peer} took longer than {timeout_s:.3g} s"
        ) from None
    except (ssl.SSLEOFError, ConnectionError) as error:
        closed = "it closed the connection during the handshake"
        raise tls_error(peer, closed, f"{_SAME_AUTHORITY}; {BOTH_SIDES}") from (
            ConnectionResetError(str(error))
        )
    except ssl.SSLError as error:
        raise refusal(error, peer) from error
    finally:
        with contextlib.suppress(OSError):  # Closed meanwhile.
            connection.settimeout(timeout_before_s)
    return cast(socket.socket, SecureConnection(connection, tls))


def _shake_hands(
    tls: ssl.SSLSocket, name: str, peer: str, deadline_s: float, *, is_server: bool
) -> None:
    tls.settimeout(_remaining_s(deadline_s))
    tls.do_handshake()
    if tls.selected_alpn_protocol() != PROTOCOL:
        raise tls_error(peer, *_ANOTHER_PROTOCOL)
    try:
        check_name(names_of(tls), name)
    except ValueError as problem:
        raise tls_error(
            peer,
            f"this side does not trust its certificate: {problem}",
            "see the name in the TLS options (WEFT_TLS_NAME)",
        ) from None
    tls.settimeout(_remaining_s(deadline_s))
    if is_server:
        tls.sendall(_ACCEPTED)
    elif (answer := tls.recv(len(_ACCEPTED))) != _ACCEPTED:
        if answer:
            raise tls_error(peer, *_ANOTHER_PROTOCOL)
        raise ConnectionResetError("it has ended TLS")


def _remaining_s(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s


def _peer_of(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except (OSError, ValueError):
        return "a peer that has disconnected"
    return f"{host}:{port}"


# Failures


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
_ANOTHER_PROTOCOL = "it does not speak Weft's protocol", "check the address and port"
_BRING_ONE = "give every worker a certificate (WEFT_TLS_CERT), or set WEFT_TLS_MUTUAL=0"


def refusal(error: ssl.SSLError, peer: str) -> TlsError:
    """Returns the error for a failed handshake."""
    reason, advice = _explain(error)
    return tls_error(peer, reason, advice)


def tls_error(peer: str, reason: str, advice: str) -> TlsError:
    """Returns the error for a handshake that failed for ``reason``."""
    return TlsError(f"no TLS connection with {peer}: {reason}; {advice}", peer=peer, reason=reason)


def _trust_advice(problem: str) -> str:
    """Returns the advice where one side does not trust the other, in OpenSSL's words."""
    is_of_time = "expired" in problem or "not yet valid" in problem
    return _RENEW if is_of_time else _SAME_AUTHORITY


def broken(error: Exception) -> ConnectionError:
    """Returns the error for a failure of an established connection."""
    reason = _reason_of(error)
    # ``SSLSocket`` raises ValueError where TLS has ended in both directions.
    if reason == "PROTOCOL_IS_SHUTDOWN" or isinstance(error, ValueError):
        return BrokenPipeError(ENDED_HERE)
    if isinstance(error, ssl.SSLEOFError):
        return ConnectionResetError(CUT_OFF)
    if not isinstance(error, ssl.SSLError):
        return ConnectionResetError(str(error))
    if _ALERT in reason:
        return ConnectionResetError(f"the other side ended TLS: {_plain_words(error)}")
    return ConnectionResetError(
        f"what arrived is not what the other side encrypted: {_plain_words(error)}"
    )


def _explain(error: ssl.SSLError) -> tuple[str, str]:
    reason = _reason_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"this side does not trust its certificate: {error.verify_message}"
        return problem, _trust_advice(problem)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has shown no certificate", _BRING_ONE
    if reason in _OLD:
        return "it speaks no TLS that is new enough", _NEW_ENOUGH
    if reason in _PLAIN:
        return "it does not speak TLS", BOTH_SIDES
    if _ALERT in reason:
        problem = f"it refused: {_plain_words(error)}"
        return problem, _trust_advice(problem)
    return _plain_words(error), BOTH_SIDES


def _reason_of(error: Exception) -> str:
    """Returns OpenSSL's name for the failure; empty if it has none."""
    return getattr(error, "reason", None) or ""


def _plain_words(error: Exception) -> str:
    """Returns ``unknown ca`` for ``TLSV1_ALERT_UNKNOWN_CA``."""
    reason = _reason_of(error)
    return reason.rpartition(_ALERT)[2].replace("_", " ").lower() if reason else str(error)
