"""The frame parser, and its twin in C: they cut or refuse a stream alike, however it comes."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

from tests.fuzz.sockets import SocketPair, socket_pair
from tests.fuzz.target import Bare, Target
from torchweft.engine.wire.frames import (
    HEADER,
    HEADER_BYTES,
    Buffer,
    Frame,
    FrameParser,
    encode_frame,
)
from torchweft.errors import ProtocolError
from torchweft.native import native

CONTROL_LIMIT_BYTES = 120
FRAME_LIMIT_BYTES = 250
AHEAD_BYTES = 60
# The receive buffer is small compared with the limits, as it is in use, or large.
_CAPACITIES = (64, 64, 64, 2048)


class _Memory:
    """Counts the memory that a parser takes."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.largest_bytes = 0

    def allocate(self, size_bytes: int) -> memoryview:
        assert 0 < size_bytes <= FRAME_LIMIT_BYTES, f"{size_bytes} bytes at once"
        self.taken_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        return memoryview(bytearray(size_bytes))


def _feed(data: bytes, capacity: int, piece_bytes: int) -> tuple[list[Frame], ProtocolError | None]:
    """Parses ``data`` in pieces; returns the frames, and why the rest was refused."""
    memory = _Memory()
    parser = FrameParser(
        memory.allocate, capacity, CONTROL_LIMIT_BYTES, FRAME_LIMIT_BYTES, AHEAD_BYTES
    )
    frames: list[Frame] = []
    at = 0
    while at < len(data):
        size = 0
        for space in parser.space():
            assert space.nbytes, "an empty space looks like the end of the connection"
            part = data[at + size : at + min(size + len(space), piece_bytes)]
            space[: len(part)] = part
            size += len(part)
        at += size
        try:
            frames += parser.received(size)
        except ProtocolError as error:
            return frames, error
        # Memory is taken for received bytes, and for the next bytes if they were announced.
        assert memory.taken_bytes <= at + AHEAD_BYTES + memory.largest_bytes
    return frames, None


def _cut_natively(
    sockets: SocketPair, data: bytes, capacity: int, piece_bytes: int
) -> tuple[list[Frame], int]:
    """Has the native twin cut ``data``; returns the frames and how many bytes were cut.

    A frame that it leaves to the parser is not cut, nor are the bytes behind it.
    """
    assert native is not None
    frames: list[Frame] = []
    receive_bytes = min(capacity, CONTROL_LIMIT_BYTES, FRAME_LIMIT_BYTES)
    link = native.Link(sockets.ours.fileno(), frames.append, False, receive_bytes, 0.0)
    for at in range(0, len(data), piece_bytes):
        piece = data[at : at + piece_bytes]
        sockets.theirs.sendall(piece)
        while link.bytes_received < at + len(piece):
            link.read(False)
            if link.is_large:
                cut_bytes = link.bytes_received - link.fill(bytearray(capacity), False)
                if link.bytes_received < at + len(piece):
                    sockets.empty()
                return frames, cut_bytes
    return frames, len(data)


def _feed_native(
    data: bytes, capacity: int, piece_bytes: int
) -> tuple[list[Frame], ProtocolError | None]:
    """Has the native twin cut ``data``; a frame that it leaves to the parser, and the rest, too."""
    with socket_pair() as sockets:
        frames, cut_bytes = _cut_natively(sockets, data, capacity, piece_bytes)
    rest, refusal = _feed(data[cut_bytes:], capacity, 1 << 20)
    return [*frames, *rest], refusal


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """Yields the native twin, which accepts streams without frames that are too large for it."""
    with socket_pair() as sockets:

        def cut(data: bytes) -> bool:
            if not data:
                return False
            capacity, piece_bytes = _CAPACITIES[data[0] & 3], (data[0] >> 2) + 1
            stream = data[1:]
            piece_bytes = max(piece_bytes, len(stream) // 8)
            _, cut_bytes = _cut_natively(sockets, stream, capacity, piece_bytes)
            return cut_bytes == len(stream)

        yield cut


def plain(frame: Frame) -> Frame:
    return frame._replace(
        control=bytes(frame.control), buffers=[bytes(buffer) for buffer in frame.buffers]
    )


def encoded(frame: Frame) -> bytes:
    buffers = [memoryview(buffer) for buffer in frame.buffers]
    return joined(encode_frame(frame.kind, frame.flags, frame.id, bytes(frame.control), buffers))


def joined(parts: list[Buffer]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def run(data: bytes) -> Exception | None:
    """Parses the rest of ``data`` twice, whole and in pieces of the size in its first byte."""
    if not data:
        return None
    capacity, piece_bytes = _CAPACITIES[data[0] & 3], (data[0] >> 2) + 1
    stream = data[1:]
    whole, refusal = _feed(stream, capacity, 1 << 20)
    cut, cut_refusal = _feed(stream, capacity, piece_bytes)
    assert (refusal is None) == (cut_refusal is None), (
        f"whole: {refusal}; in pieces of {piece_bytes}: {cut_refusal}"
    )
    if native is not None:
        by_twin, twin_refusal = _feed_native(stream, capacity, max(piece_bytes, len(stream) // 8))
        assert (refusal is None) == (twin_refusal is None), f"plain: {refusal}; C: {twin_refusal}"
        if refusal is None:  # The parser drops the frames that it has cut before.
            assert list(map(plain, by_twin)) == list(map(plain, whole))
    for frame in whole:
        assert len(frame.control) <= CONTROL_LIMIT_BYTES
        assert len(encoded(frame)) <= FRAME_LIMIT_BYTES
    if refusal is None:
        frames = [plain(frame) for frame in whole]
        assert frames == [plain(frame) for frame in cut]
        assert stream.startswith(b"".join(map(encoded, frames)))
    return refusal


def seeds() -> list[bytes]:
    """Returns streams of frames of every shape, cut in several ways."""
    plain = encoded(Frame(4, 2, 7, b"control part", []))
    one = encoded(Frame(3, 0, 1 << 63, b"c" * 30, [b"x" * 20]))
    large = encoded(Frame(3, 0, 9, b"c" * 50, [b"x" * 90, b"", b"y" * 40]))
    empty = encoded(Frame(0, 0, 0, b"", []))
    many = encoded(Frame(5, 1, 2, b"", [b"ab"] * 20))
    beyond = HEADER.pack(1, 0, 2, 10, 0) + struct.pack("<2Q", 1 << 63, 1 << 63)
    streams = (plain + one + empty, large + plain, many + one, empty * 3, plain + large, beyond)
    long_control = encoded(Frame(3, 0, 0, b"c" * CONTROL_LIMIT_BYTES, []))
    streams += (plain + long_control, HEADER.pack(1, 0, 0xFFFF, 0, 0) + b"\0" * HEADER_BYTES)
    return [bytes([cut]) + stream for stream in streams for cut in (4 << 2, 17 << 2, 61 << 2 | 3)]


TARGET = Target("frames", run, seeds, length_limit=400, bare=None if native is None else bare)
