"""A ring in shared memory: the peer writes anything into its heads and bytes, at any time.

An input is a list of steps of this side and of its peer. The memory belongs to the peer as well,
so only the own counts of this side are sure. Whatever the peer does, a step takes no longer than
the ring is large, gives frames that the peer has written, or ends the connection with an error.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator

from tests.fuzz.memory import exact_memory
from tests.fuzz.sockets import SocketPair, socket_pair
from tests.fuzz.target import Bare, Target
from torchweft.engine.wire.frames import HEADER, Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.native import native

_HEAD_BYTES = 256
_RING_BYTES = 61
_RECEIVE_BYTES = 100
_MEMORY_BYTES = 2 * (_HEAD_BYTES + _RING_BYTES)
_READ_FROM = 2 * _HEAD_BYTES + _RING_BYTES
"""Where the bytes begin that this side reads."""
_FIELDS = tuple(side + field for side in (0, _HEAD_BYTES) for field in (0, 64, 128, 192))
_NEAR = (0, 1, _RING_BYTES - 1, _RING_BYTES, _RING_BYTES + 1, 1 << 31, 1 << 63, (1 << 64) - 1)
_GARBAGE, _COUNT, _BELLS, _FRAME, _PUBLISH, _WRITE, _READ, _WAIT, _SLEEP, _END = range(10)
_BELLS_SENT = [bytes(count) for count in range(100)]
_STEP_HEAD = struct.Struct("<BBH")
_HEAD_ALIGNMENT = 64


_ZEROS = bytes(_MEMORY_BYTES)


class _Sides:
    """This side's link, and what its peer can do."""

    def __init__(self, memory: memoryview, sockets: SocketPair) -> None:
        assert native is not None
        self.memory, self.sockets = memory, sockets
        self.memory[:] = _ZEROS
        self.frames: deque[Frame] = deque()
        self.link = native.Link(
            sockets.ours.fileno(),
            self.frames.append,
            False,
            _RECEIVE_BYTES,
            0.0,
            self.memory,
            True,
        )
        self.link.watch(-1, -1, [].append, None)
        self.put = 0
        self.has_ended = False

    def put_garbage(self, number: int, data: bytes) -> None:
        """Has the peer write bytes anywhere into the memory."""
        offset = number % (_MEMORY_BYTES - len(data))
        self.memory[offset : offset + len(data)] = data

    def put_count(self, number: int, _: bytes) -> None:
        """Has the peer write a number that a head can hardly have."""
        field, value = _FIELDS[number % len(_FIELDS)], _NEAR[number // 8 % len(_NEAR)]
        if number & 1:
            value = (value + self.put) % (1 << 64)
        _pack_count(self.memory, field, value)

    def ring_bells(self, number: int, _: bytes) -> None:
        """Has the peer send bytes on the socket."""
        if not self.has_ended:
            self.sockets.theirs.send(_BELLS_SENT[number % len(_BELLS_SENT)], socket.MSG_DONTWAIT)

    def put_frame(self, number: int, data: bytes) -> None:
        """Puts a frame behind the others, as a peer that keeps to the protocol does."""
        frame = HEADER.pack(Kind.POST, 0, 0, len(data), number) + data
        at, end = self.put % _RING_BYTES, self.put % _RING_BYTES + len(frame)
        if end <= _RING_BYTES:
            self.memory[_READ_FROM + at : _READ_FROM + end] = frame
        else:
            self.memory[_READ_FROM + at :] = frame[: _RING_BYTES - at]
            self.memory[_READ_FROM : _READ_FROM + end - _RING_BYTES] = frame[_RING_BYTES - at :]
        self.put += len(frame)

    def publish(self, _: int, __: bytes) -> None:
        """Has the peer tell of all that it has put."""
        # The second head is of the direction that this side reads.
        _pack_count(self.memory, _HEAD_BYTES, self.put)

    def write(self, number: int, data: bytes) -> None:
        """Writes a frame; raises OSError where this side ends the connection."""
        self.link.write(encode_frame(Kind.REPLY, 0, number, data * (number % 5)))

    def read(self, _: int, __: bytes) -> None:
        """Reads as a thread of the reactor; raises OSError where this side ends the connection."""
        assert self.link.claim()
        before = self.link.bytes_received
        try:
            if self.link.awaits_room:
                self.link.write(())
            if self.link.is_large:
                self.link.is_large = bool(self.link.fill(bytearray(_RECEIVE_BYTES), False))
            else:
                self.link.read(False)
        finally:
            self.link.unclaim()
            assert self.link.bytes_received - before <= _RING_BYTES, "more than the ring has"

    def wait(self, number: int, _: bytes) -> None:
        """Waits for a frame with a lease; raises OSError where this side ends the connection."""
        assert native is not None
        lease, taken = native.Lease.take(self.link), []
        if lease is not None:
            lease.wait(1 << Kind.POST, number, taken, None, -1, 0.0, -1)
            lease.release()
            self.frames += taken

    def sleep(self, _: int, __: bytes) -> None:
        """Arms the link, as a thread of the reactor that reads no more."""
        self.link.arm()

    def end(self, _: int, __: bytes) -> None:
        """Has the peer end the connection."""
        self.has_ended = True
        self.sockets.theirs.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends this side."""
        self.link.close()
        self.link.close()
        if self.has_ended:
            self.sockets.renew()
        else:
            self.sockets.empty()


_pack_count = struct.Struct("<Q").pack_into
# In the order of their numbers.
_STEPS: tuple[Callable[[_Sides, int, bytes], None], ...] = (
    _Sides.put_garbage,
    _Sides.put_count,
    _Sides.ring_bells,
    _Sides.put_frame,
    _Sides.publish,
    _Sides.write,
    _Sides.read,
    _Sides.wait,
    _Sides.sleep,
    _Sides.end,
)


def _run(data: bytes) -> Exception | None:
    if native is not None:
        try:
            with bare() as carry_out:
                carry_out(data)
        except OSError as error:
            return error
    return None


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """Yields what carries out steps; it raises OSError where this side ends the connection."""
    with socket_pair() as sockets:
        memory = exact_memory(_MEMORY_BYTES, _HEAD_ALIGNMENT)

        def carry_out(data: bytes) -> bool:
            sides = _Sides(memory, sockets)
            try:
                _carry_out(sides, data)
            finally:
                sides.close()
            return True

        yield carry_out


def _carry_out(sides: _Sides, data: bytes) -> None:
    end, last = 0, len(data) - _STEP_HEAD.size
    while end <= last:
        kind, size, number = _STEP_HEAD.unpack_from(data, end)
        begin = end + _STEP_HEAD.size
        end = begin + size % 24
        _STEPS[kind % len(_STEPS)](sides, number, data[begin:end])
    for frame in sides.frames:
        assert len(frame.control) <= _RECEIVE_BYTES


def _step(kind: int, number: int = 0, data: bytes = b"") -> bytes:
    return _STEP_HEAD.pack(kind, len(data), number) + data


def _make(chance: random.Random) -> bytes:
    steps = []
    for _ in range(chance.randrange(1, 30)):
        kind = chance.choice((_FRAME, _PUBLISH, _WRITE, _READ, *range(10)))
        steps.append(_step(kind, chance.randrange(1 << 16), chance.randbytes(chance.randrange(24))))
    return b"".join(steps)


def _seeds() -> list[bytes]:
    came = _step(_FRAME, 7, b"control") + _step(_PUBLISH)
    return [
        came + _step(_READ),
        (came + _step(_WAIT, 7)) * 3,
        _step(_WRITE, 4, b"x" * 23) * 3 + _step(_READ) + _step(_COUNT, 8 * 3) + _step(_READ),
        came + _step(_SLEEP) + _step(_BELLS, 3) + _step(_END) + _step(_READ) * 3,
        *(_step(_COUNT, number) + _step(_READ) + _step(_WRITE, 1, b"x") for number in range(64)),
    ]


TARGET = Target("ring", _run, _seeds, make=_make, bare=None if native is None else bare)
