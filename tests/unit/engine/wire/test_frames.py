from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets.frames import encoded, plain
from tests.thorough import examples
from torchweft.engine.wire.frames import (
    HEADER,
    HEADER_BYTES,
    MAX_BUFFERS,
    Frame,
    FrameParser,
    encode_frame,
)
from torchweft.errors import ProtocolError

CAPACITY = 64
CONTROL_LIMIT = 1000
FRAME_LIMIT = 2000


class Memory:
    """Counts the bytes that a parser allocates."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    def allocate(self, size_bytes: int) -> memoryview:
        assert size_bytes > 0
        self.taken_bytes += size_bytes
        return memoryview(bytearray(size_bytes))


def new_parser(
    memory: Memory | None = None,
    *,
    capacity: int = CAPACITY,
    control_limit: int = CONTROL_LIMIT,
    frame_limit: int = FRAME_LIMIT,
) -> FrameParser:
    memory = memory or Memory()
    return FrameParser(memory.allocate, capacity, control_limit, frame_limit)


def feed(parser: FrameParser, data: bytes, sizes: list[int]) -> list[Frame]:
    """Feeds ``data`` in pieces of ``sizes``, repeated, through the space that the parser offers."""
    frames: list[Frame] = []
    at, turn = 0, 0
    while at < len(data):
        piece = data[at : at + max(sizes[turn % len(sizes)], 1)]
        turn += 1
        size = 0
        for space in parser.space():
            assert space.nbytes, "an empty space looks like the end of the connection"
            part = piece[size : size + len(space)]
            space[: len(part)] = part
            size += len(part)
        at += size
        frames += parser.received(size)
    return [plain(frame) for frame in frames]


bodies = st.one_of(
    st.binary(max_size=12),
    st.integers(CAPACITY - HEADER_BYTES - 10, CAPACITY + 3).map(lambda size: b"x" * size),
)
frames = st.builds(
    Frame,
    kind=st.integers(0, 255),
    flags=st.integers(0, 255),
    id=st.integers(0, 2**64 - 1),
    control=bodies,
    buffers=st.lists(bodies, max_size=4),
)


@settings(max_examples=examples(100))
@given(st.lists(frames, max_size=4), st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_how_the_stream_is_cut_does_not_matter(sent: list[Frame], sizes: list[int]) -> None:
    stream = b"".join(map(encoded, sent))
    assert feed(new_parser(), stream, sizes) == sent


def test_more_buffers_than_fit_a_frame_are_refused_at_the_sender() -> None:
    with pytest.raises(ProtocolError, match="at most 65535"):
        encode_frame(1, 0, 0, b"", [memoryview(b"")] * (MAX_BUFFERS + 1))


def test_memory_is_taken_as_a_frame_comes() -> None:
    memory = Memory()
    parser = FrameParser(memory.allocate, CAPACITY, CONTROL_LIMIT, FRAME_LIMIT, 250)
    frame = Frame(1, 0, 0, b"control", [b"a" * 200, b"b" * 100, b"", b"c" * 300, b"d" * 50])
    stream = encoded(frame)
    head = HEADER_BYTES + 8 * len(frame.buffers) + len(frame.control)
    assert feed(parser, stream[:head], [7]) == []
    assert memory.taken_bytes == 300
    assert feed(parser, stream[head : head + 200], [7]) == []
    assert memory.taken_bytes == 600
    assert feed(parser, stream[head + 200 :], [7]) == [frame]
    assert memory.taken_bytes == 650


def test_a_large_control_part_gets_memory_of_its_own() -> None:
    memory = Memory()
    size = (1 << 20) + 1
    parser = new_parser(memory, control_limit=2 * size, frame_limit=3 * size)
    frame = Frame(1, 0, 0, b"c" * size, [b"x" * 80])
    assert feed(parser, encoded(frame), [1 << 16]) == [frame]
    assert memory.taken_bytes == size + 80


@pytest.mark.parametrize("lengths", [[FRAME_LIMIT], [2**64 - 1], [2**63, 2**63]])
def test_a_frame_beyond_the_limit_is_refused_before_memory_is_taken(lengths: list[int]) -> None:
    memory = Memory()
    head = HEADER.pack(1, 0, len(lengths), 0, 0) + struct.pack(f"<{len(lengths)}Q", *lengths)
    with pytest.raises(ProtocolError, match="the limit is 2000"):
        feed(new_parser(memory), head, [100])
    assert memory.taken_bytes == 0
