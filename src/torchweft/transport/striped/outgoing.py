"""The sender's side: transfers that wait to be sent, and the connections that write them."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from torchweft.runtime.transfer_loop import NOTHING, WRITABLE, forget_nothing
from torchweft.transport.striped.stripes import Stripe
from torchweft.wire.frames import Buffer

_TURN_BYTES = 4 << 20
_ROOM_TRANSFERS = 32
_ROOM_BYTES = 256 << 20


class _Transfer:
    """One tensor's memory, and the offset of its next stripe."""

    __slots__ = ("buffer", "offset", "position", "token")

    def __init__(self, token: int, position: int, buffer: memoryview) -> None:
        self.token = token
        self.position = position
        self.buffer = buffer
        self.offset = 0


class Outbox:
    """The transfers to be sent to one peer, and the idle connections. Thread-safe.

    The memory of a transfer is kept until it has been written.

    Args:
        stripe_bytes: Size of the pieces that transfers are cut into.
    """

    def __init__(self, stripe_bytes: int) -> None:
        self._stripe_bytes = stripe_bytes
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._transfers: deque[_Transfer] = deque()
        self._waiting_bytes = 0
        self._idle: list[SendingConnection] = []
        self._connection_count = 0
        self._is_closed = False

    def put(self, token: int, buffers: Sequence[memoryview]) -> list[SendingConnection]:
        """Adds transfers; returns idle connections, which the caller now owns and must start.

        Args:
            token: Token of their message.
            buffers: Contiguous memory, no buffer empty.
        """
        stripe_count = sum(-(-buffer.nbytes // self._stripe_bytes) for buffer in buffers)
        with self._lock:
            if self._is_closed or not stripe_count:
                return []
            self._waiting_bytes += sum(buffer.nbytes for buffer in buffers)
            for position, buffer in enumerate(buffers):
                self._transfers.append(_Transfer(token, position, buffer))
            started = self._idle[-stripe_count:]
            del self._idle[-stripe_count:]
        return started

    def take(self, connection: SendingConnection) -> list[Buffer]:
        """Returns the next stripe for a connection to write; empty if it is idle from now on."""
        with self._lock:
            if not self._transfers:
                # It may be idle already: an event for its descriptor's former owner can be late.
                if not self._is_closed and connection not in self._idle:
                    self._idle.append(connection)
                return []
            transfer = self._transfers.popleft()
            start, size = transfer.offset, transfer.buffer.nbytes
            end = transfer.offset = min(start + self._stripe_bytes, size)
            self._waiting_bytes -= end - start
            if end < size:
                self._transfers.append(transfer)
            elif self._is_roomy():
                self._has_room.notify_all()
        header = Stripe(transfer.token, transfer.position, start, end - start, size).encode()
        return [header, transfer.buffer[start:end]]

    def add_connection(self) -> None:
        """Counts one more connection, which is about to ``take`` stripes."""
        with self._lock:
            self._connection_count += 1

    def close(self) -> None:
        """Drops all unwritten transfers, now and in future."""
        with self._lock:
            self._is_closed = True
            # Dropped outside the lock: freeing a tensor may run arbitrary code.
            dropped, self._transfers = self._transfers, deque()
            self._idle.clear()
            self._has_room.notify_all()
        dropped.clear()

    def wait_for_room(self) -> None:
        """Blocks while so many transfers wait that more would only use up memory."""
        with self._lock:
            self._has_room.wait_for(lambda: self._is_closed or self._is_roomy())

    def _is_roomy(self) -> bool:
        return len(self._transfers) < _ROOM_TRANSFERS and self._waiting_bytes < _ROOM_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        with self._lock:
            has_all_idle = len(self._idle) == self._connection_count
            return self._is_closed or (not self._transfers and has_all_idle)


class SendingConnection:
    """One connection that writes the stripes of an outbox.

    Args:
        connection: A connected socket; owned from here on.
        outbox: The source of the stripes.
        on_end: Called with the cause when the connection breaks.
    """

    def __init__(
        self, connection: socket.socket, outbox: Outbox, on_end: Callable[[str], None]
    ) -> None:
        self._socket = connection
        self._outbox = outbox
        self._on_end = on_end
        self._lock = threading.Lock()
        self._parts: list[Buffer] = []
        self._is_closed = False
        self.bytes_sent = 0
        connection.setblocking(False)
        self.fd = connection.fileno()

    def write(self) -> int:
        """Writes what the socket takes, up to a turn's share; returns the next event to await."""
        try:
            with self._lock:
                return NOTHING if self._is_closed else self._write(_TURN_BYTES)
        except OSError as error:
            self._on_end(str(error))
            return NOTHING

    def _write(self, turn_bytes: int) -> int:
        while turn_bytes > 0:
            if not self._parts:
                self._parts = self._outbox.take(self)
                if not self._parts:
                    return NOTHING
            try:
                size = self._socket.sendmsg(self._parts)
            except BlockingIOError:
                return WRITABLE
            turn_bytes -= size
            self.bytes_sent += size
            self._parts = _advance(self._parts, size)
        return WRITABLE

    def close(self, forget: Callable[[int], None] = forget_nothing) -> None:
        """Ends the connection and frees its descriptor; drops the stripe being written.

        Args:
            forget: Called with the descriptor before it is freed, but not by a second ``close``:
                another connection may have the descriptor by then.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            parts, self._parts = self._parts, []
            forget(self.fd)
            self._socket.close()
        del parts


def _advance(parts: list[Buffer], size: int) -> list[Buffer]:
    """Drops the first ``size`` bytes of a header and its payload."""
    while parts and size >= len(parts[0]):
        size -= len(parts[0])
        parts = parts[1:]
    return [memoryview(parts[0])[size:], *parts[1:]] if size else parts
