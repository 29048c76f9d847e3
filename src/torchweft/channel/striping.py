"""Stripes of large tensors, and the data connections that carry them.

On the one control link a tensor of 1 GiB would delay every small call behind it. One TCP stream is
also limited to one thread's copying on either side. So such a tensor is cut into *stripes*, which
travel over *data connections*. A stripe names its *transfer* and its place in it. The receiver
reads it straight into that place, whichever connection it arrives on.

Rules of this file:

- Nothing blocks. A few threads of one *transfer loop*, of ``torchweft.threads.transfer_loop``,
  wait for all data connections of a worker. So neither a slow peer nor two workers that send to
  each other keep a connection from being read.
- Every connection has one owner at a time: nobody (idle), a thread, or the loop's ``epoll``. The
  owner passes it on; so a lock is needed only against ``close``.
- Transfers take turns, a stripe each: a second transfer does not wait for the end of the first.
- A stripe is a slice of an array, not of a ``memoryview``. The slices of one view share a count,
  which free-threaded Python changes without a lock; then the memory is freed while it is in use
  (https://github.com/python/cpython/issues/155606). A slice of an array has a view of its own.

A transfer is identified by the set of connections that it takes, its message's token and its
position among that message's transfers. The header of a stripe is little-endian, followed by
``length`` bytes of the tensor::

    token u64 | position u64 | offset u64 | length u64 | size of the whole transfer u64

The receiver knows a transfer from its first stripe or the first wait for it, whichever comes first;
its memory is allocated then. It is forgotten when it is taken, when its set breaks before it is
complete or, if it was discarded, when it is complete.
"""

from __future__ import annotations

import socket
import struct
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from torchweft.channel.channel import NotInTime
from torchweft.channel.memory import Bytes
from torchweft.errors import ProtocolError
from torchweft.threads.transfer_loop import NOTHING, READABLE, WRITABLE, forget_nothing
from torchweft.transport.link import SEND_PATIENCE_S
from torchweft.wire.frames import Allocate, Buffer

_HEADER = struct.Struct("<QQQQQ")
HEADER_BYTES = _HEADER.size
_EVERYTHING = 1 << 62
_TURN_BYTES = 4 << 20
_ROOM_TRANSFERS = 32
_ROOM_BYTES = 256 << 20
_UNDER_WAY_LIMIT = 1 << 17
_NOWHERE = memoryview(b"")

OnEnd = Callable[[str], None]
"""Takes the cause for which a connection has ended."""


class TransferKey(NamedTuple):
    """Identifies a transfer of one sender.

    Attributes:
        set_number: The set of connections that carries it; sets of a sender count from 1.
        token: Token of its message.
        position: Its position among the transfers of the message.
    """

    set_number: int
    token: int
    position: int


class Stripe(NamedTuple):
    """A part of a transfer."""

    token: int
    position: int
    offset: int
    length_bytes: int
    size_bytes: int

    def encode(self) -> bytes:
        """Returns the header."""
        return _HEADER.pack(*self)


def decode_stripe(data: bytes | bytearray | memoryview, limit_bytes: int) -> Stripe:
    """Reads and checks a header, before any memory is allocated for the transfer.

    Raises:
        ProtocolError: The stripe is empty, lies outside of its transfer, or the transfer is
            larger than the limit.
    """
    stripe = Stripe._make(_HEADER.unpack(data))
    offset, length, size = stripe[2:]
    if size > limit_bytes:
        raise ProtocolError(f"a transfer announces {size} bytes; the limit is {limit_bytes}")
    if not length or offset + length > size:
        raise ProtocolError(
            f"a stripe of {length} bytes at {offset} is no part of a transfer of {size} bytes"
        )
    return stripe


class _Connection:
    """One data connection.

    Args:
        connection: A connected socket; owned from here on.
        on_end: Called with the cause when the connection ends.
    """

    def __init__(self, connection: socket.socket, on_end: OnEnd) -> None:
        self._socket = connection
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_closed = False
        connection.setblocking(False)
        self.fd = connection.fileno()

    def abandon(self) -> None:
        """Frees the descriptor in a forked process; its parent keeps the connection."""
        self._socket.close()

    def close(self, forget: Callable[[int], None] = forget_nothing) -> None:
        """Ends the connection and frees its descriptor; drops the stripe that is being moved.

        Args:
            forget: Called with the descriptor before it is freed, but not by a second ``close``:
                another connection may have the descriptor by then.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            dropped = self._drop()
            forget(self.fd)
            self._socket.close()
        del dropped  # Outside the lock: freeing a tensor may run any code.

    def _drop(self) -> object:
        """Gives up the stripe that is being moved; returns its memory."""
        raise NotImplementedError


# The sender's side


class _Transfer:
    """One tensor's memory or a part of it, and the offset of its next stripe."""

    __slots__ = ("end", "memory", "offset", "position", "token")

    def __init__(self, token: int, position: int, buffer: memoryview, start: int, end: int) -> None:
        self.token, self.position = token, position
        self.memory = np.frombuffer(buffer, np.uint8)
        self.offset = start
        self.end = end


class Outbox:
    """A set of connections to one peer, and the transfers to be sent over it. Thread-safe.

    Keeps the memory of a transfer until that is written. A transfer may be added in parts.

    Attributes:
        number: Number of the set.
        connections: Its connections.

    Args:
        stripe_bytes: Size of the pieces that transfers are cut into.
        number: Number of the set.
    """

    def __init__(self, stripe_bytes: int, number: int = 1) -> None:
        self.number = number
        self.connections: list[SendingConnection] = []
        self._stripe_bytes = stripe_bytes
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._transfers: deque[_Transfer] = deque()
        self._waiting_bytes = 0
        self._idle: list[SendingConnection] = []
        self._is_closed = False

    def put(self, token: int, buffers: Sequence[memoryview]) -> list[SendingConnection]:
        """Adds transfers; returns idle connections, which the caller now owns and must start.

        Args:
            token: Token of their message.
            buffers: Contiguous memory, no buffer empty.
        """
        whole = [(buffer, 0, buffer.nbytes) for buffer in buffers]
        return self._put([_Transfer(token, n, *each) for n, each in enumerate(whole)])

    def put_part(
        self, token: int, position: int, buffer: memoryview, start: int, end: int
    ) -> list[SendingConnection]:
        """Adds a part of a transfer whose other bytes are added later, or were before.

        Takes the memory of the whole transfer, and the part of it. Returns connections as ``put``.
        """
        return self._put([_Transfer(token, position, buffer, start, end)])

    def _put(self, transfers: Sequence[_Transfer]) -> list[SendingConnection]:
        sizes = [transfer.end - transfer.offset for transfer in transfers]
        stripe_count = sum([-(-size // self._stripe_bytes) for size in sizes])
        with self._lock:
            if self._is_closed or not stripe_count:
                return []
            self._waiting_bytes += sum(sizes)
            self._transfers.extend(transfers)
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
            start, size = transfer.offset, transfer.memory.nbytes
            end = transfer.offset = min(start + self._stripe_bytes, transfer.end)
            self._waiting_bytes -= end - start
            if end < transfer.end:
                self._transfers.append(transfer)
            elif self._is_roomy():
                self._has_room.notify_all()
        header = Stripe(transfer.token, transfer.position, start, end - start, size).encode()
        return [header, transfer.memory[start:end].data]

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
        """Waits while more would only use up memory, but not for a peer that takes nothing."""
        with self._lock:
            while not (self._is_closed or self._is_roomy()):
                before = self._waiting_bytes
                is_told = self._has_room.wait(SEND_PATIENCE_S)
                if not is_told and self._waiting_bytes >= before:
                    return  # The call's own time limit must not wait for a stopped peer.

    def _is_roomy(self) -> bool:
        return len(self._transfers) < _ROOM_TRANSFERS and self._waiting_bytes < _ROOM_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        with self._lock:
            are_idle = len(self._idle) == len(self.connections)
            return self._is_closed or (not self._transfers and are_idle)


class SendingConnection(_Connection):
    """One connection that writes the stripes of an outbox, to which it adds itself.

    Args:
        connection: A connected socket; owned from here on.
        outbox: The source of the stripes.
        on_end: Called with the cause when the connection breaks.
    """

    def __init__(self, connection: socket.socket, outbox: Outbox, on_end: OnEnd) -> None:
        super().__init__(connection, on_end)
        self._outbox = outbox
        self._parts: list[Buffer] = []
        outbox.connections.append(self)

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
            self._parts = _advance(self._parts, size)
        return WRITABLE

    def _drop(self) -> object:
        parts, self._parts = self._parts, []
        return parts


def _advance(parts: list[Buffer], size: int) -> list[Buffer]:
    """Drops the first ``size`` bytes of a header and its payload."""
    while parts and size >= len(parts[0]):
        size -= len(parts[0])
        parts = parts[1:]
    return [memoryview(parts[0])[size:], *parts[1:]] if size else parts


# The receiver's side


class _Arrival:
    """One transfer: its memory, and the number of missing bytes."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.missing_bytes = size_bytes
        self.is_wanted = True
        self.done = allocate_lock()
        self.done.acquire()
        self._array: Bytes | None = None
        self._array_lock = allocate_lock()

    def array(self, allocate: Allocate) -> Bytes:
        """Returns the memory; the first call allocates it."""
        with self._array_lock:
            if self._array is None:
                self._array = np.frombuffer(allocate(self.size_bytes), np.uint8)
            return self._array


class Arrivals:
    """The transfers from one peer. Thread-safe.

    Args:
        allocate: Returns writable memory of a given size in bytes.
        limit_bytes: Largest transfer accepted.
    """

    def __init__(self, allocate: Allocate, limit_bytes: int) -> None:
        self._allocate = allocate
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._under_way: dict[TransferKey, _Arrival] = {}
        self._broken_set = 0
        self._error: Callable[[], Exception] | None = None
        self.bytes_received = 0

    def wait(self, key: TransferKey, size_bytes: int, stall_s: float) -> memoryview:
        """Blocks until a transfer is complete; returns its memory, which the caller owns.

        Args:
            key: The transfer.
            size_bytes: Its size according to the message.
            stall_s: Seconds without a single byte of any transfer after which to give up.

        Raises:
            TimeoutError: No byte of any transfer has arrived for ``stall_s``.
            ProtocolError: The stripes announce another size.
            NotInTime: Its set of connections has broken.
            Exception: The error from ``fail``.
        """
        arrival = self._arrival(key, size_bytes)
        memory = arrival.array(self._allocate).data
        last_count = -1
        while not arrival.done.acquire(timeout=stall_s):
            if self.bytes_received == last_count:
                raise TimeoutError(f"nothing came for {stall_s:.0f} s")
            last_count = self.bytes_received
        with self._lock:
            self._under_way.pop(key, None)
            error = self._error
            is_here = not arrival.missing_bytes
        if not is_here:
            del arrival, memory  # The error's traceback would keep them alive.
            raise _broken(key) if error is None else error()
        return memory

    def is_here(self, key: TransferKey) -> bool:
        """Whether ``wait`` would return at once."""
        arrival = self._under_way.get(key)
        return self._error is not None or (arrival is not None and not arrival.missing_bytes)

    def discard(self, key: TransferKey, size_bytes: int) -> None:
        """Notes that no thread will wait for a transfer: it is dropped when it is complete."""
        try:
            arrival = self._arrival(key, size_bytes)
        except Exception:
            return  # The peer is lost, its set is broken, or the size is invalid.
        with self._lock:
            arrival.is_wanted = False
            if not arrival.missing_bytes:
                self._under_way.pop(key, None)

    def give_up(self, set_number: int) -> None:
        """Gives up the incomplete transfers of a set and earlier ones, now and in future.

        Waits for them raise ``NotInTime``. The connections of the set are closed by now.
        """
        with self._lock:
            self._broken_set = max(self._broken_set, set_number)
            ended = [
                (key, arrival)
                for key, arrival in self._under_way.items()
                if key.set_number <= set_number and arrival.missing_bytes
            ]
            for key, _ in ended:
                del self._under_way[key]
        for _, arrival in ended:
            arrival.done.release()

    def fail(self, error: Callable[[], Exception]) -> None:
        """Makes present and future waits raise what ``error`` returns; drops other transfers."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            failed, self._under_way = list(self._under_way.values()), {}
        for arrival in failed:
            if arrival.missing_bytes:
                arrival.done.release()

    @property
    def count(self) -> int:
        """Number of transfers that are under way, or complete and not yet taken."""
        return len(self._under_way)

    def begin(self, key: TransferKey, stripe: Stripe) -> tuple[_Arrival, memoryview]:
        """Returns the transfer of a stripe, and the memory for the stripe's bytes."""
        arrival = self._arrival(key, stripe.size_bytes)
        end = stripe.offset + stripe.length_bytes
        return arrival, arrival.array(self._allocate)[stripe.offset : end].data

    def complete(self, key: TransferKey, stripe: Stripe, arrival: _Arrival) -> None:
        """Notes that all bytes of a stripe have arrived."""
        with self._lock:
            is_late = arrival.missing_bytes < stripe.length_bytes
            arrival.missing_bytes -= stripe.length_bytes
            if not arrival.missing_bytes and self._under_way.get(key) is arrival:
                arrival.done.release()
                if not arrival.is_wanted:
                    del self._under_way[key]
        if is_late:
            raise ProtocolError(f"{key} has more stripes than bytes")

    def _arrival(self, key: TransferKey, size_bytes: int) -> _Arrival:
        with self._lock:
            if self._error is not None:
                raise self._error()
            arrival = self._under_way.get(key)
            if arrival is None:
                if key.set_number <= self._broken_set:
                    raise _broken(key)
                if len(self._under_way) >= _UNDER_WAY_LIMIT:
                    raise ProtocolError(f"over {_UNDER_WAY_LIMIT} tensors are announced at once")
                arrival = self._under_way[key] = _Arrival(size_bytes)
        if arrival.size_bytes != size_bytes:
            raise ProtocolError(f"{key} has {arrival.size_bytes} bytes once and {size_bytes} then")
        return arrival


def _broken(key: TransferKey) -> NotInTime:
    return NotInTime(f"a connection of set {key.set_number} broke before all of {key} had come")


class ReceivingConnection(_Connection):
    """One connection over which a peer sends stripes.

    Args:
        connection: A connected socket; owned from here on.
        arrivals: The peer's transfers.
        set_number: Number of its set.
        on_end: Called when the connection ends. Gets the cause if the data was invalid or there was
            no memory for it, and an empty string if the connection only ended.
    """

    def __init__(
        self, connection: socket.socket, arrivals: Arrivals, set_number: int, on_end: OnEnd
    ) -> None:
        super().__init__(connection, on_end)
        self._arrivals = arrivals
        self.set_number = set_number
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_end = 0
        self._arrival: _Arrival | None = None
        self._stripe = Stripe(0, 0, 0, 0, 0)
        self._key = TransferKey(0, 0, 0)
        self._missing = _NOWHERE

    def read(self) -> int:
        """Receives what has arrived, up to a turn's share; returns the next event to await."""
        with self._lock:
            if self._is_closed:
                return NOTHING
            cause = self._receive(_TURN_BYTES)
        if cause is None:
            return READABLE
        self._on_end(cause)
        return NOTHING

    def drain(self) -> str:
        """Receives all that has arrived, from a connection that is about to be closed.

        Returns:
            The cause that ``on_end`` would get; empty if there was no error but the end.
        """
        with self._lock:
            return "" if self._is_closed else self._receive(_EVERYTHING) or ""

    def _receive(self, turn_bytes: int) -> str | None:
        """Returns None if the connection goes on, and otherwise the cause for ``on_end``."""
        try:
            self._read(turn_bytes)
        except (EOFError, OSError):
            return ""
        except ProtocolError as error:
            return f"a data connection carried malformed data: {error}"
        except MemoryError:
            return "there is no memory for a tensor of it"
        except Exception as error:  # the error from ``Arrivals.fail``: the peer was lost
            return str(error)
        return None

    def _read(self, turn_bytes: int) -> None:
        # No event announces bytes that a secure connection has already received.
        while turn_bytes > 0 or getattr(self._socket, "pending", False):
            # The end of one stripe and the header of the next in one call.
            parts = [self._header[self._header_end :]]
            if self._arrival is not None:
                parts.insert(0, self._missing)
            try:
                size = self._socket.recvmsg_into(parts)[0]
            except BlockingIOError:
                return
            if not size:
                raise EOFError
            turn_bytes -= size
            self._fill(size)

    def _fill(self, size: int) -> None:
        """Accounts for received bytes."""
        if self._arrival is not None:
            taken = min(size, self._missing.nbytes)
            self._arrivals.bytes_received += taken
            self._missing = self._missing[taken:]
            size -= taken
            if self._missing.nbytes:
                return
            # An empty slice would also keep the memory alive.
            self._missing = _NOWHERE
            arrival, self._arrival = self._arrival, None
            self._arrivals.complete(self._key, self._stripe, arrival)
        self._header_end += size
        if self._header_end == HEADER_BYTES:
            self._header_end = 0
            self._stripe = decode_stripe(self._header, self._arrivals.limit_bytes)
            self._key = TransferKey(self.set_number, *self._stripe[:2])
            self._arrival, self._missing = self._arrivals.begin(self._key, self._stripe)

    def _drop(self) -> object:
        dropped = self._arrival, self._missing
        self._arrival, self._missing = None, _NOWHERE
        return dropped
