"""A link over TCP, which outlives its connections: see ``docs/protocols/sessions.md``.

To senders and readers it is a ``Link`` that never breaks, but may be silent for a while: what is
sent meanwhile is kept. When a connection ends, the link reports that once; the thread that makes
a new connection hands it over by ``resume``.

The stream of the link keeps what was written, because it may have to be sent again. The session
knows the positions only.

The descriptors under which the reactor knows the link are duplicates. They keep their numbers
from one connection to the next, so that no thread ever arms or pauses another file's descriptor.

Below, the kernel tells when it last heard from the peer. The peer's kernel answers keepalive probes
for as long as the process has the connection, whatever its threads do. So the time of the last
answer distinguishes a silent network, or a dead machine, from a busy worker. If only our outgoing
path fails, we still receive the peer's retransmissions. So while we retransmit too, incoming data
is no sign of life.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torchweft.engine.io.link import (
    POLL_S,
    READ_TICK_S,
    SEND_PATIENCE_S,
    Link,
    LinkClosed,
    Serving,
    shut,
    tune,
)
from torchweft.engine.wire.frames import Buffer, FrameParser, encode_frame
from torchweft.engine.wire.messages import Kind, decode_ints, encode_ints
from torchweft.engine.wire.session import (
    ACKNOWLEDGE_BYTES,
    ALONE_BYTES,
    LEAST_BYTES,
    Incoming,
    Outgoing,
)
from torchweft.errors import ProtocolError


class BreakListener(Protocol):
    """Called, on any thread, when the connection of a link has ended.

    The descriptors of the link are useless until ``resume``.
    """

    def __call__(self, link: ResumableLink, cause: str, *, is_answer: bool) -> None: ...


class ResumableLink(Link):
    """One session with a peer, over one connection at a time.

    Args:
        connection: A connected socket, or an equivalent object; owned from here on.
        parser: Cuts received bytes into frames.
        when_full: As for ``Link``.
        on_break: Called once for each connection that ends.
        limit_bytes: Kept bytes beyond which senders that may block wait.
    """

    _keeps = True

    def __init__(
        self,
        connection: socket.socket,
        parser: FrameParser,
        when_full: Callable[[Link], None],
        on_break: BreakListener,
        limit_bytes: int,
    ) -> None:
        super().__init__(connection, parser, when_full)
        self.resuming = threading.Lock()
        """Held by the thread that gives the link a connection."""
        self.resumption_count = 0
        self._on_break = on_break
        self._limit_bytes = limit_bytes
        self._outgoing = Outgoing()
        # A peer with the same limit must not wait for an acknowledgement that is not due yet.
        self._incoming = Incoming(min(ALONE_BYTES, limit_bytes // 4))
        self._receiving = threading.Lock()
        self._lock = threading.RLock()
        """Guards the positions, and which connection the session has."""
        self._is_broken = False
        self._resumed = threading.Event()
        self._resumed.set()

    @property
    def is_broken(self) -> bool:
        """Whether the session has no connection now."""
        return self._is_broken

    @property
    def kept_bytes(self) -> int:
        """How many bytes are queued or not acknowledged."""
        return int(self._stream.position) - self._outgoing.acknowledged

    # Sending

    def _send(self, parts: Sequence[Buffer], may_block: bool) -> None:
        if may_block:
            self._wait_for_room()
        if self._counted().is_due:
            # Before the message: one write wakes the peer once.
            self.hold(_acknowledgement(self._incoming.repetition()))
        super()._send(parts, may_block)

    def _cannot_write(self, error: OSError) -> None:
        self._note_break(error)

    def _wait_for_room(self) -> None:
        """Waits while too much is kept, but not for a peer that acknowledges nothing for long."""
        acknowledged, limit_s = -1, 0.0
        while self.kept_bytes > self._limit_bytes and not self._is_closed:
            if self._outgoing.acknowledged != acknowledged:
                acknowledged = self._outgoing.acknowledged
                limit_s = time.monotonic() + SEND_PATIENCE_S
            elif time.monotonic() > limit_s:
                return
            time.sleep(POLL_S)

    def acknowledged(self, position: int) -> None:
        """Releases what the peer has received; raises ProtocolError if that was never sent."""
        # A thread in ``resume`` does the same, and both at once would release too much.
        with self._lock:
            self._outgoing.position = self._stream.position
            self._outgoing.acknowledge(position)
            self._stream.acknowledge(position)

    def acknowledge(self) -> None:
        """Acknowledges received bytes, unless there are hardly any. Never blocks."""
        self._acknowledge(self._counted().acknowledgement())

    def prompt(self) -> None:
        """Sends something to which the peer's kernel responds. Never blocks.

        Does nothing while the peer has not acknowledged much: then the kernels are in contact.
        """
        if self.kept_bytes <= ACKNOWLEDGE_BYTES:
            self._acknowledge(self._counted().repetition())

    def _acknowledge(self, position: int | None) -> None:
        if position is not None and not self._is_broken:
            with contextlib.suppress(LinkClosed):
                self.send(_acknowledgement(position), may_block=False)

    # Receiving

    def _counted(self) -> Incoming:
        """Returns the count of received bytes, to which waiting threads contribute in C."""
        self._incoming.position = self.bytes_received
        return self._incoming

    def receive(
        self, may_block: bool, may_spin: bool = False, serving: Serving | None = None
    ) -> bool:
        if self._is_broken:
            if self._is_closed:
                raise LinkClosed("the connection is closed")
            if may_block:
                self._resumed.wait(READ_TICK_S)
            return True
        with self._receiving:
            try:
                if not self._is_broken:
                    super().receive(may_block, may_spin)
            except LinkClosed as error:
                if self._is_closed:
                    raise
                self._note_break(error)
        if self._counted().is_much:
            self.acknowledge()
        return True

    # Breaks

    def silence_s(self) -> float | None:
        """Returns for how long the kernel has heard nothing from the peer; None if unknown."""
        return None if self._is_broken else silence_s(self._socket)

    def break_off(self, cause: str) -> None:
        """Ends the connection, but not the session: the peer reports a break."""
        self._note_break(ConnectionError(cause))

    def _note_break(self, error: OSError) -> None:
        with self._lock:
            if self._is_broken or self._is_closed:
                return
            self._break()
        # A timeout comes from this side's kernel. An end that arrives while our segments are not
        # acknowledged is from a peer that hears nothing: it will not answer a new connection.
        is_answer = isinstance(error.__cause__ or error, ConnectionError)
        is_answer = is_answer and not is_unanswered(self._socket)
        shut(self._socket)
        self._on_break(self, str(error), is_answer=is_answer)

    def _break(self) -> None:
        self._stream.is_broken = self._is_broken = True
        self._resumed.clear()

    def stop(self) -> int:
        """Ends the connection to replace it; returns the position that this side has received.

        Nothing more is received until ``resume``; if the replacement fails, ``report_break`` must
        follow.
        """
        with self._lock:
            self._break()
        shut(self._socket)
        with self._receiving:
            while self.native is not None and self.native.is_looking:
                time.sleep(POLL_S)  # A waiting thread finds the end, or the last bytes.
            return self.bytes_received

    def report_break(self, cause: str) -> None:
        """Reports the break if a stopped session still has no connection."""
        if self._is_broken and not self._is_closed:
            self._on_break(self, cause, is_answer=True)

    def resume(self, connection: socket.socket, peer_position: int) -> None:
        """Continues the session over a new connection.

        Args:
            connection: A connected socket, or an equivalent object; owned from here on.
            peer_position: How many bytes the peer has received in the session.

        Raises:
            LinkClosed: The session has ended meanwhile.
            ProtocolError: This side cannot continue from the peer's position.
        """
        self._stream.is_broken = True
        shut(self._socket)  # Makes threads that read or write it return.
        with self._receiving, self._lock:
            try:
                if self._is_closed:
                    raise LinkClosed("the session has ended")
                if not self._wait_for_writer():
                    raise LinkClosed("a thread still writes to the connection before")
                self._outgoing.position = self._stream.position
                self._outgoing.since(peer_position)
            except (LinkClosed, ProtocolError):
                connection.close()
                raise
            self._outgoing.acknowledge(peer_position)
            self._stream.acknowledge(peer_position)
            tune(connection)
            former, self._socket = self._socket, connection
            os.dup2(connection.fileno(), self.read_fd, inheritable=False)
            os.dup2(connection.fileno(), self.write_fd, inheritable=False)
            former.close()
            if self.native is None:
                self._stream.connection = connection
            self._stream.resume(peer_position)
            self._is_broken = False
            self.resumption_count += 1
        self._resumed.set()

    # The end

    def say_goodbye(self, reason: bytes = b"") -> None:
        """Tells the peer that the coming end of the connection is not a break."""
        with contextlib.suppress(LinkClosed):  # The session has ended, maybe just now.
            self.send(encode_frame(Kind.GOODBYE, 0, 0, reason), may_block=False)

    def drain(self, timeout_s: float) -> None:
        """Waits, for a limited time, until the peer has acknowledged everything.

        At most the size of this side's last acknowledgement may stay unacknowledged.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.kept_bytes > LEAST_BYTES:
            if self._is_closed or time.monotonic() > deadline_s:
                return
            time.sleep(POLL_S)

    def hang_up(self) -> None:
        with self._lock:
            super().hang_up()
        self._resumed.set()

    def _release(self) -> None:
        with self._receiving:
            super()._release()


def _acknowledgement(position: int) -> list[Buffer]:
    return encode_frame(Kind.ACKNOWLEDGED, 0, 0, encode_ints(position))


def position_in(control: Buffer) -> int:
    """Returns the position of an ``ACKNOWLEDGED``; raises ProtocolError if it has none."""
    values = decode_ints(control)
    if len(values) != 1:
        raise ProtocolError(f"an acknowledgement has {len(values)} positions")
    return values[0]


_RETRANSMITS_OFFSET = 2
"""Of ``tcpi_retransmits``: retransmissions of the oldest data since the last acknowledgement."""
_LAST_RECEIVED = struct.Struct("=II")
_LAST_RECEIVED_OFFSET = 52
"""Of ``tcpi_last_data_recv`` and ``tcpi_last_ack_recv`` in Linux's ``struct tcp_info``."""
_INFO_BYTES = _LAST_RECEIVED_OFFSET + _LAST_RECEIVED.size

CAN_HEAR = hasattr(socket, "TCP_INFO")
"""Whether the system has this information; if not, its own limits end a silent connection."""


def probe_interval_s(detection_s: float) -> int:
    """Returns the interval of probes on an idle connection: kernels count in whole seconds."""
    return max(1, math.floor(detection_s / 5))


def keep_alive(connection: socket.socket, detection_s: float) -> None:
    """Makes the kernel probe a TCP connection while nothing else is sent.

    If ``silence_s`` does not work, the kernel ends the connection itself after about
    ``detection_s``.
    """
    interval_s = probe_interval_s(detection_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": max(2, math.ceil(detection_s / interval_s)),
        "TCP_USER_TIMEOUT": int(2e3 * detection_s if CAN_HEAR else 1e3 * detection_s),
    }
    for name, value in limits.items():
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence_s(connection: socket.socket) -> float | None:
    """Returns the seconds since anything came from the peer.

    None if unknown, or meaningless because the peer does not acknowledge what this side sends.
    """
    info = _info(connection)
    if not info or info[_RETRANSMITS_OFFSET]:
        return None
    return float(min(_LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_OFFSET))) / 1e3


def is_unanswered(connection: socket.socket) -> bool:
    """Whether the peer does not acknowledge what this side sends, as far as is known."""
    info = _info(connection)
    return bool(info and info[_RETRANSMITS_OFFSET])


def _info(connection: socket.socket) -> bytes:
    """Returns the beginning of ``struct tcp_info``; empty if there is none."""
    if not CAN_HEAR:
        return b""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return b""
    return info if len(info) == _INFO_BYTES else b""
