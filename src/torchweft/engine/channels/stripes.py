"""The channel ``striped``: large tensors over connections of their own, beside the control link.

The sender dials a set of connections when it has the first large tensor for a peer, and states the
purpose in its greeting; a set runs one way only. The message goes over the control link at once;
its handles name the set, and its token the transfers that the receiver waits for.

A broken data connection is not resumed: see ``docs/protocols/sessions.md``. Both sides give up its
whole set. The receiver then gets from the set's transfers what is complete, and asks for all others
behind the message. Handles of a set that has broken before the message is read end the same way.

On the one control link a tensor of 1 GiB would delay every small call behind it. One TCP stream is
also limited to one thread's copying on either side. So such a tensor is cut into *stripes*, which
travel over *data connections*. A stripe names its *transfer* and its place in it. The receiver
reads it straight into that place, whichever connection it arrives on.

Rules of this file:

- Nothing blocks. A few threads of one *transfer loop*, of ``engine.channels.transfer_loop``,
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

import functools
import logging
import socket
import struct
import threading
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import Channel, Copies, Entry, Handle, Home, NotInTime, Peer
from torchweft.engine.channels.device_copies import HostCopies
from torchweft.engine.channels.memory import Bytes
from torchweft.engine.channels.transfer_loop import (
    NOTHING,
    READABLE,
    WRITABLE,
    Connection,
    OnEnd,
    TransferLoop,
)
from torchweft.engine.codec.tensors import as_memory
from torchweft.engine.io.link import SEND_PATIENCE_S
from torchweft.engine.io.session import keep_alive
from torchweft.engine.wire.frames import Allocate, Buffer
from torchweft.engine.wire.messages import Kind, decode_ints, encode_ints
from torchweft.errors import NotInitialized, ProtocolError, WeftError

_log = logging.getLogger("torchweft")

_HEADER = struct.Struct("<QQQQQ")
HEADER_BYTES = _HEADER.size
_EVERYTHING = 1 << 62
_TURN_BYTES = 4 << 20
_ROOM_TRANSFERS = 32
_ROOM_BYTES = 256 << 20
_UNDER_WAY_LIMIT = 1 << 17
_NOWHERE = memoryview(b"")

Part = tuple[int, memoryview, int, int]
"""A transfer to send, or a part of it: its position, its memory, and the range to send."""


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


# The sender's side


class _Transfer:
    """One tensor's memory or a part of it, and the offset of its next stripe."""

    def __init__(self, token: int, position: int, buffer: memoryview, start: int, end: int) -> None:
        self.token, self.position = token, position
        self.memory = np.frombuffer(buffer, np.uint8)
        self.offset, self.end = start, end


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

    def put(self, token: int, parts: Iterable[Part]) -> list[SendingConnection]:
        """Adds transfers, or parts of transfers whose other bytes are added later or were before.

        Returns idle connections, which the caller now owns and must start.

        Args:
            token: Token of their message.
            parts: The position of each transfer in the message, its contiguous memory, and the
                range to send, which is not empty.
        """
        transfers = [_Transfer(token, *part) for part in parts]
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


class SendingConnection(Connection):
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
        self.under_way: dict[TransferKey, _Arrival] = {}
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
            self.under_way.pop(key, None)
            error, is_here = self._error, not arrival.missing_bytes
        if is_here:
            return memory
        del arrival, memory  # The error's traceback would keep them alive.
        raise _broken(key) if error is None else error()

    def is_here(self, key: TransferKey) -> bool:
        """Whether ``wait`` would return at once."""
        arrival = self.under_way.get(key)
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
                self.under_way.pop(key, None)

    def give_up(self, set_number: int) -> None:
        """Gives up the incomplete transfers of a set and earlier ones, now and in future.

        Waits for them raise ``NotInTime``. The connections of the set are closed by now.
        """
        with self._lock:
            self._broken_set = max(self._broken_set, set_number)
            self._end(lambda key, is_here: key.set_number <= set_number and not is_here)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Makes present and future waits raise what ``error`` returns; drops other transfers."""
        with self._lock:
            if self._error is None:
                self._error = error
                self._end(lambda key, is_here: True)

    def _end(self, is_over: Callable[[TransferKey, bool], bool]) -> None:
        """Forgets some transfers, and wakes those that wait for them."""
        for key, arrival in list(self.under_way.items()):
            if is_over(key, not arrival.missing_bytes):
                del self.under_way[key]
                if arrival.missing_bytes:
                    arrival.done.release()

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
            if not arrival.missing_bytes and self.under_way.get(key) is arrival:
                arrival.done.release()
                if not arrival.is_wanted:
                    del self.under_way[key]
        if is_late:
            raise ProtocolError(f"{key} has more stripes than bytes")

    def _arrival(self, key: TransferKey, size_bytes: int) -> _Arrival:
        with self._lock:
            if self._error is not None:
                raise self._error()
            arrival = self.under_way.get(key)
            if arrival is None:
                if key.set_number <= self._broken_set:
                    raise _broken(key)
                if len(self.under_way) >= _UNDER_WAY_LIMIT:
                    raise ProtocolError(f"over {_UNDER_WAY_LIMIT} tensors are announced at once")
                arrival = self.under_way[key] = _Arrival(size_bytes)
        if arrival.size_bytes != size_bytes:
            raise ProtocolError(f"{key} has {arrival.size_bytes} bytes once and {size_bytes} then")
        return arrival


def _broken(key: TransferKey) -> NotInTime:
    return NotInTime(f"a connection of set {key.set_number} broke before all of {key} had come")


class ReceivingConnection(Connection):
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
            return None
        except (EOFError, OSError):
            return ""
        except ProtocolError as error:
            return f"a data connection carried malformed data: {error}"
        except MemoryError:
            return "there is no memory for a tensor of it"
        except Exception as error:  # the error from ``Arrivals.fail``: the peer was lost
            return str(error)

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


# The channel

_SET = struct.Struct("<I")
"""The handle: number of the set."""
_DIAL_AGAIN_S = 10.0
"""How long tensors follow their messages after a failure to make data connections."""
_SPARE_WAITS = 16
"""How many tasks may wait for tensors without counting as running; each takes a thread."""


class _PeerData:
    """The data connections with one peer, in both directions."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.dial_lock = threading.Lock()
        self.dial_again_s = 0.0
        self.lock = threading.RLock()
        self.set_count = 0
        self.sending: Outbox | None = None
        self.receiving: list[ReceivingConnection] = []
        self.broken_set = 0
        """The highest number of a broken set of the peer's connections."""
        self.is_closed = False


class _Striped(Handle):
    """A buffer that goes over a set of connections."""

    __slots__ = ("copies", "sending")

    def __init__(self, sending: Outbox, memory: memoryview) -> None:
        super().__init__(_SET.pack(sending.number), memory.nbytes, memory)
        self.sending = sending
        self.copies: HostCopies | None = None

    @property
    def is_slow(self) -> bool:  # type: ignore[override]
        return self.copies is not None

    def memory(self) -> memoryview:
        if self.copies is not None:
            self.copies.wait()
        return super().memory()


class Stripes(Channel):
    """Tensors that travel over data connections; see the module."""

    name, number = "striped", 4
    sends_apart = True

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.from_bytes = knobs.STRIPED_FROM_BYTES.get()
        self._inline_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self._pump = TransferLoop(f"weft-{home.name}-data", knobs.STRIPE_THREADS.get())
        self._stall_s = knobs.STRIPE_STALL_S.get()
        self._lock = threading.RLock()
        self._is_closed = False
        self._spare_waits = threading.Semaphore(_SPARE_WAITS)
        home.on(Kind.DATA_BROKEN, self._on_data_broken)
        home.on(Kind.UNSENT, self._on_unsent)

    # Sending

    def put(self, peer: Peer, token: int, buffers: Sequence[Tensor]) -> Sequence[Handle | None]:
        """Takes large tensors, and tensors that are large together.

        Following the message, the latter would delay later messages just as long.
        """
        sizes = [buffer.nbytes for buffer in buffers]
        least_bytes = self.from_bytes
        if sum([n for n in sizes if self._inline_bytes < n < least_bytes]) >= least_bytes:
            least_bytes = self._inline_bytes + 1
        if max(sizes) < least_bytes:
            return ()
        sending = self._reach(peer)
        if sending is None:
            return ()
        return [
            _Striped(sending, as_memory(buffer)) if size >= least_bytes else None
            for size, buffer in zip(sizes, buffers, strict=True)
        ]

    def begin(
        self, peer: Peer, token: int, handles: Sequence[_Striped], *, may_wait: bool, copies: Copies
    ) -> None:
        sending = handles[0].sending
        if may_wait:
            sending.wait_for_room()
        if copies is not None:
            self._send_as_ready(peer, token, handles, copies)
            return
        # If the set has broken meanwhile, it takes nothing, and the receiver has been told.
        sizes = [(handle.kept, 0, handle.size_bytes) for handle in handles]
        started = sending.put(token, [(n, *each) for n, each in enumerate(sizes)])
        for connection in started[1:]:
            self._pump.arm(connection.fd, WRITABLE)
        # This thread writes the first share: the transfer threads would have to be woken first.
        for connection in started[:1]:
            self._pump.arm(connection.fd, connection.write())

    def _send_as_ready(
        self, peer: Peer, token: int, handles: Sequence[_Striped], copies: HostCopies
    ) -> None:
        """Sends buffers part by part, as copies fill them. Blocks until the copies are done."""
        sending = handles[0].sending
        for handle in handles:
            handle.copies = copies
        try:
            buffers = [handle.kept for handle in handles]
            for position, start, end in copies.parts(buffers):
                part = position, buffers[position], start, end
                for connection in sending.put(token, [part]):
                    self._pump.arm(connection.fd, WRITABLE)
        except BaseException:
            # The message will not be sent: the receiver must not keep what has arrived.
            self._break_sending(peer, sending.number, "a copy from a device failed")
            raise

    def _reach(self, peer: Peer) -> Outbox | None:
        """Returns the set of connections to a peer, dialled now if there is none.

        Blocks for a limited time. Returns None if there cannot be a set now.
        """
        data = self._of(peer)
        if data.sending is not None:
            return data.sending
        with data.dial_lock:
            is_early = time.monotonic() < data.dial_again_s
            if data.sending is not None or data.is_closed or self._is_closed or is_early:
                return data.sending
            data.set_count += 1
            try:
                dialled = self._home.dial(peer, knobs.STRIPE_CONNECTIONS.get(), data.set_count)
                self._adopt(peer, data, dialled)
            except (ConnectionRefusedError, ProtocolError) as error:
                if not data.is_closed:
                    peer.ways.give_up(self.name, f"no data connection can be made: {error}")
            except OSError as error:
                data.dial_again_s = time.monotonic() + _DIAL_AGAIN_S
                _log.info("no data connection to worker %r now: %s", peer.name, error)
            return data.sending

    def _adopt(self, peer: Peer, data: _PeerData, dialled: Sequence[socket.socket]) -> None:
        sending = Outbox(knobs.STRIPE_BYTES.get(), data.set_count)
        on_end = functools.partial(self._break_sending, peer, sending.number)
        with data.lock:
            self._check_open(data, dialled)
            for one in dialled:
                connection = SendingConnection(one, sending, on_end)
                # Within the lock: no connection may be closed before it is watched.
                self._pump.watch(connection.fd, connection.write, WRITABLE)
            data.sending = sending

    def _on_data_broken(self, peer: Peer, control: Buffer) -> None:
        for number in decode_ints(control):
            self._break_sending(peer, number, "the peer says that one has ended")

    def _break_sending(self, peer: Peer, number: int, cause: str) -> None:
        """Ends a set with a broken connection; the peer asks for the tensors that are missing."""
        data = self._of(peer)
        with data.lock:
            sending = data.sending
            if sending is None or sending.number != number:
                return
            data.sending = None
        _log.info("data connections to worker %r are made again: %s", peer.name, cause)
        self._close_all(sending.connections)
        sending.close()
        self._home.post(peer, Kind.UNSENT, encode_ints(number))

    # Receiving

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[memoryview]:
        data = self._of(peer)
        sizes = _transfers(token, entries)
        if all(map(data.arrivals.is_here, sizes)):
            return self._wait(peer, data, sizes)
        if not self._spare_waits.acquire(blocking=False):
            self._home.reactor.wake()  # Urgent tasks must not wait for this thread.
            return self._wait(peer, data, sizes)
        try:
            with self._home.waiting(peer):
                return self._wait(peer, data, sizes)
        finally:
            self._spare_waits.release()

    def _wait(
        self, peer: Peer, data: _PeerData, sizes: dict[TransferKey, int]
    ) -> Sequence[memoryview]:
        buffers: list[memoryview] = []
        try:
            for key, size in sizes.items():
                buffers.append(data.arrivals.wait(key, size, self._stall_s))
        except BaseException as error:
            if isinstance(error, TimeoutError):
                # A busy peer is not lost: it sends when asked. The error's traceback would keep the
                # memory, so the log has its text.
                text = "a tensor of worker %r is late: %s; requesting it again"
                _log.warning(text, peer.name, str(error))
                number = next(iter(sizes)).set_number
                self._end_receiving(peer, number)
                self._home.post(peer, Kind.DATA_BROKEN, encode_ints(number))
            for key, size in list(sizes.items())[len(buffers) :]:
                data.arrivals.discard(key, size)
            if isinstance(error, TimeoutError):
                raise NotInTime(str(error)) from None
            raise
        return buffers

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        """Has the transfers of a message dropped on arrival: they will not be fetched."""
        for key, size in _transfers(token, entries).items():
            self._of(peer).arrivals.discard(key, size)

    def take(self, peer: Peer, connection: socket.socket, number: int) -> bool:
        """Accepts a connection of a numbered set, over which ``peer`` will send."""
        data = self._of(peer)
        with data.lock:
            self._check_open(data, [connection])
            if number <= data.broken_set:
                connection.close()
                return True
            receiving = ReceivingConnection(
                connection,
                data.arrivals,
                number,
                lambda cause: self._on_end(peer, receiving, cause),
            )
            data.receiving.append(receiving)
            self._pump.watch(receiving.fd, receiving.read, READABLE)
        return True

    def _on_end(self, peer: Peer, receiving: ReceivingConnection, cause: str) -> None:
        if cause:
            self._home.lose(peer, cause)
            return
        # A sender that shuts down ends all connections of a set. The end of one may be read before
        # data of the others that has arrived as well.
        data, number = self._of(peer), receiving.set_number
        with data.lock:
            others = [each for each in data.receiving if each.set_number <= number]
        for other in others:
            if cause := other.drain():
                self._home.lose(peer, cause)
                return
        self._close_all([receiving])
        self._end_receiving(peer, number)
        if not data.is_closed:
            self._home.post(peer, Kind.DATA_BROKEN, encode_ints(number))

    def _on_unsent(self, peer: Peer, control: Buffer) -> None:
        for number in decode_ints(control):
            self._end_receiving(peer, number)

    def _end_receiving(self, peer: Peer, number: int) -> None:
        """Ends the peer's connections of a set, and earlier ones: no data may arrive late."""
        data = self._of(peer)
        with data.lock:
            data.broken_set = max(data.broken_set, number)
            ended = [each for each in data.receiving if each.set_number <= data.broken_set]
        self._close_all(ended)
        # Remove them last: a concurrent call must find them, and wait for those being read.
        with data.lock:
            data.receiving = [each for each in data.receiving if each not in ended]
        data.arrivals.give_up(number)

    # The end

    def lost(self, peer: Peer) -> None:
        """Ends the connections with a lost peer; waits for its tensors fail now."""
        data = self._of(peer)
        with data.lock:
            data.is_closed = True
            sending, data.sending = data.sending, None
            receiving, data.receiving = data.receiving, []
        data.arrivals.fail(functools.partial(self._end_error, peer))
        self._close_all(receiving)
        if sending is not None:
            self._close_all(sending.connections)
            sending.close()

    def _end_error(self, peer: Peer) -> WeftError:
        if peer.is_over:
            return peer.lost_error()
        return NotInitialized(
            f"worker {self._home.name!r} shut down before all of a tensor of worker "
            f"{peer.name!r} had come"
        )

    def abandon(self) -> None:
        for data in self._known():
            sending = data.sending
            for connection in (*(sending.connections if sending else ()), *data.receiving):
                connection.abandon()

    def close(self, limit_s: float) -> None:
        """Sends waiting data, for at most ``limit_s``; then ends all connections and threads."""
        self._is_closed = True
        deadline_s = time.monotonic() + limit_s
        outboxes = [each for data in self._known() if (each := data.sending) is not None]
        while not all(box.is_empty for box in outboxes) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        for peer in list(self._home.peers.values()):
            if not peer.is_self:
                self.lost(peer)
        self._pump.close()

    def _of(self, peer: Peer) -> _PeerData:
        data: _PeerData | None = peer.kept.get(self.name)
        if data is None:
            with self._lock:
                arrivals = Arrivals(self._home.pool.lease, knobs.FRAME_LIMIT_BYTES.get())
                data = peer.kept.setdefault(self.name, _PeerData(arrivals))
        return data

    def _known(self) -> list[_PeerData]:
        peers = list(self._home.peers.values())
        return [peer.kept[self.name] for peer in peers if self.name in peer.kept]

    def _check_open(self, data: _PeerData, connections: Sequence[socket.socket]) -> None:
        """Closes new connections and raises an error if the peer is lost; else has them watched."""
        for connection in connections:
            if data.is_closed:
                connection.close()
            else:
                keep_alive(connection, self._home.detection_s)
        if data.is_closed:
            raise ConnectionAbortedError("the peer is lost, or this worker has shut down")

    def _close_all(self, connections: Sequence[SendingConnection | ReceivingConnection]) -> None:
        for connection in connections:
            connection.close(self._pump.forget)


def _transfers(token: int, entries: Sequence[Entry]) -> dict[TransferKey, int]:
    """Returns the transfers of a message with their sizes, in order."""
    sizes: dict[TransferKey, int] = {}
    for position, entry in enumerate(entries):
        if len(entry.content) != _SET.size:
            raise ProtocolError(f"a handle of a transfer has {len(entry.content)} bytes")
        sizes[TransferKey(_SET.unpack(entry.content)[0], token, position)] = entry.size_bytes
    return sizes
