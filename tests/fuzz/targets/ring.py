"""A ring in shared memory: the peer writes anything into its heads and bytes, at any time.

An input is a list of steps of this side and of its peer. The memory belongs to the peer as well,
so only the own counts of this side are sure. Whatever the peer does, a step takes no longer than
the ring is large, gives frames that the peer has written, or ends the connection with an error.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import socket
import struct
from collections import deque

from tests.fuzz.target import Target
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.native import native

_HEAD_BYTES = 256
_RING_BYTES = 61
_RECEIVE_BYTES = 100
_MEMORY_BYTES = 2 * (_HEAD_BYTES + _RING_BYTES)
_FIELDS = tuple(side + field for side in (0, _HEAD_BYTES) for field in (0, 64, 128, 192))
_NEAR = (0, 1, _RING_BYTES - 1, _RING_BYTES, _RING_BYTES + 1, 1 << 31, 1 << 63, (1 << 64) - 1)
_GARBAGE, _COUNT, _BELLS, _FRAME, _PUBLISH, _WRITE, _READ, _WAIT, _SLEEP, _END = range(10)


class _Sides:
    """This side's link, and what its peer can do."""

    def __init__(self) -> None:
        assert native is not None
        self.memory = mmap.mmap(-1, _MEMORY_BYTES)
        self.ours, self.theirs = socket.socketpair()
        self.frames: deque[Frame] = deque()
        self.link = native.Link(
            self.ours.fileno(),
            self.frames.append,
            False,
            _RECEIVE_BYTES,
            0.0,
            self.memory,
            True,
        )
        self.link.watch(-1, -1, [].append, None)
        self.put = 0
        self.written = bytearray()

    def step(self, kind: int, number: int, data: bytes) -> None:
        """Carries out one step; raises OSError where this side ends the connection."""
        if kind == _GARBAGE:
            offset = number % (_MEMORY_BYTES - len(data))
            self.memory[offset : offset + len(data)] = data
        elif kind == _COUNT:
            field, value = _FIELDS[number % len(_FIELDS)], _NEAR[number // 8 % len(_NEAR)]
            if number & 1:
                value = (value + self.put) % (1 << 64)
            struct.pack_into("<Q", self.memory, field, value)
        elif kind == _BELLS:
            with contextlib.suppress(OSError):
                self.theirs.send(bytes(number % 100), socket.MSG_DONTWAIT)
        elif kind == _FRAME:
            self._put(b"".join(encode_frame(Kind.POST, 0, number, data)))
        elif kind == _PUBLISH:
            # The second head is of the direction that this side reads.
            struct.pack_into("<Q", self.memory, _HEAD_BYTES, self.put)
        elif kind == _WRITE:
            self.link.write(encode_frame(Kind.REPLY, 0, number, data * (number % 5)))
        elif kind == _READ:
            self._read()
        elif kind == _WAIT:
            self._wait(number)
        elif kind == _SLEEP:
            self.link.arm()
        else:
            self.theirs.shutdown(socket.SHUT_RDWR)

    def _put(self, data: bytes) -> None:
        """Puts bytes behind the others, as a peer that keeps to the protocol does."""
        begin = 2 * _HEAD_BYTES + _RING_BYTES
        for byte in data[:_RING_BYTES]:
            self.memory[begin + self.put % _RING_BYTES] = byte
            self.put += 1

    def _read(self) -> None:
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

    def _wait(self, number: int) -> None:
        assert native is not None
        lease, taken = native.Lease.take(self.link), []
        if lease is not None:
            lease.wait(1 << Kind.POST, number, taken, None, -1, 0.0, -1)
            lease.release()
            self.frames += taken

    def close(self) -> None:
        self.link.close()
        self.link.close()
        self.ours.close()
        self.theirs.close()


def _run(data: bytes) -> Exception | None:
    if native is None:
        return None
    sides, at = _Sides(), 0
    try:
        while at + 4 <= len(data):
            kind, size, number = data[at] % 10, data[at + 1] % 24, data[at + 2] | data[at + 3] << 8
            sides.step(kind, number, data[at + 4 : at + 4 + size])
            at += 4 + size
        for frame in sides.frames:
            assert len(frame.control) <= _RECEIVE_BYTES
    except OSError as error:
        return error
    finally:
        sides.close()
    return None


def _step(kind: int, number: int = 0, data: bytes = b"") -> bytes:
    return bytes((kind, len(data))) + struct.pack("<H", number) + data


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


TARGET = Target("ring", _run, _seeds, make=_make)
