"""The channel ``striped``: large tensors over connections of their own, beside the control link.

The sender dials a set of connections when it has the first large tensor for a peer, and states the
purpose in its greeting; a set runs one way only. The message goes over the control link at once;
its handles name the set, and its token the transfers that the receiver waits for.
``torchweft.channel.striping`` moves the bytes.

A broken data connection is not resumed: see ``docs/protocols/sessions.md``. Both sides give up its
whole set. The receiver then gets from the set's transfers what is complete, and asks for all others
behind the message. Handles of a set that has broken before the message is read end the same way.
"""

from __future__ import annotations

import functools
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from torchweft import knobs
from torchweft.channel.channel import Channel, Copies, Entry, Handle, Home, NotInTime, Peer
from torchweft.channel.copying import address_of
from torchweft.channel.device_copies import HostCopies
from torchweft.channel.striping import (
    Arrivals,
    Outbox,
    ReceivingConnection,
    SendingConnection,
    TransferKey,
)
from torchweft.errors import NotInitialized, ProtocolError, WeftError
from torchweft.serialize.tensors import as_memory
from torchweft.threads.transfer_loop import READABLE, WRITABLE, TransferLoop
from torchweft.transport.session import keep_alive
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import Kind, decode_ints, encode_ints

_log = logging.getLogger("torchweft")

_SET = struct.Struct("<I")
"""The handle: number of the set."""
_DRAIN_POLL_S = 0.001
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
        self._stripe_bytes = knobs.STRIPE_BYTES.get()
        self._connection_count = knobs.STRIPE_CONNECTIONS.get()
        self._stall_s = knobs.STRIPE_STALL_S.get()
        self._limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
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
        started = sending.put(token, [handle.kept for handle in handles])
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
            for position, start, end in _ready_parts(copies, handles):
                buffer = handles[position].kept
                for connection in sending.put_part(token, position, buffer, start, end):
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
                dialled = self._home.dial(peer, self._connection_count, data.set_count)
                self._adopt_sending(peer, data, dialled)
            except (ConnectionRefusedError, ProtocolError) as error:
                if not data.is_closed:
                    self._home.give_up(peer, self, f"no data connection can be made: {error}")
            except OSError as error:
                data.dial_again_s = time.monotonic() + _DIAL_AGAIN_S
                _log.info("no data connection to worker %r now: %s", peer.name, error)
            return data.sending

    def _adopt_sending(self, peer: Peer, data: _PeerData, dialled: Sequence[socket.socket]) -> None:
        sending = Outbox(self._stripe_bytes, data.set_count)
        on_end = functools.partial(self._break_sending, peer, sending.number)
        with data.lock:
            _check_open(data, dialled)
            for one in dialled:
                keep_alive(one, self._home.detection_s)
                SendingConnection(one, sending, on_end)
            # Within the lock: no connection may be closed before it is watched.
            for connection in sending.connections:
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
                self._give_up_late(peer, next(iter(sizes)).set_number, error)
            for key, size in list(sizes.items())[len(buffers) :]:
                data.arrivals.discard(key, size)
            if isinstance(error, TimeoutError):
                raise NotInTime(str(error)) from None
            raise
        return buffers

    def _give_up_late(self, peer: Peer, number: int, error: Exception) -> None:
        """Gives up a set that brings nothing. A busy peer is not lost: it sends when asked."""
        # As text: the error's traceback would keep the memory.
        text = "a tensor of worker %r is late: %s; requesting it again"
        _log.warning(text, peer.name, str(error))
        self._end_receiving(peer, number)
        self._home.post(peer, Kind.DATA_BROKEN, encode_ints(number))

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        """Has the transfers of a message dropped on arrival: they will not be fetched."""
        for key, size in _transfers(token, entries).items():
            self._of(peer).arrivals.discard(key, size)

    def take(self, peer: Peer, connection: socket.socket, number: int) -> bool:
        """Accepts a connection of a numbered set, over which ``peer`` will send."""
        data = self._of(peer)
        keep_alive(connection, self._home.detection_s)
        with data.lock:
            _check_open(data, [connection])
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
            time.sleep(_DRAIN_POLL_S)
        for peer in list(self._home.peers.values()):
            if not peer.is_self:
                self.lost(peer)
        self._pump.close()

    def _of(self, peer: Peer) -> _PeerData:
        data: _PeerData | None = peer.kept.get(self.name)
        if data is None:
            with self._lock:
                arrivals = Arrivals(self._home.pool.lease, self._limit_bytes)
                data = peer.kept.setdefault(self.name, _PeerData(arrivals))
        return data

    def _known(self) -> list[_PeerData]:
        found = [peer.kept.get(self.name) for peer in list(self._home.peers.values())]
        return [data for data in found if data is not None]

    def _close_all(self, connections: Sequence[SendingConnection | ReceivingConnection]) -> None:
        for connection in connections:
            connection.close(self._pump.forget)


def _check_open(data: _PeerData, connections: Sequence[socket.socket]) -> None:
    if data.is_closed:
        for connection in connections:
            connection.close()
        raise ConnectionAbortedError("the peer is lost, or this worker has shut down")


def _transfers(token: int, entries: Sequence[Entry]) -> dict[TransferKey, int]:
    """Returns the transfers of a message with their sizes, in order."""
    sizes: dict[TransferKey, int] = {}
    for position, entry in enumerate(entries):
        if len(entry.content) != _SET.size:
            raise ProtocolError(f"a handle of a transfer has {len(entry.content)} bytes")
        sizes[TransferKey(_SET.unpack(entry.content)[0], token, position)] = entry.size_bytes
    return sizes


def _ready_parts(copies: HostCopies, handles: Sequence[_Striped]) -> Iterator[tuple[int, int, int]]:
    """Yields position, start and end of the ranges of buffers as their bytes are there."""
    numbers = {address_of(each): n for n, each in enumerate(copies.memories) if each.nbytes}
    position_of: dict[int, int] = {}
    for position, handle in enumerate(handles):
        number = numbers.get(address_of(handle.kept))
        if number is None:  # Memory of the host, with all of its bytes.
            yield position, 0, handle.size_bytes
        else:
            position_of[number] = position
    for number, start, end in copies.parts(position_of):
        yield position_of[number], start, end
