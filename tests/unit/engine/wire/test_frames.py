from __future__ import annotations

import random
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


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_frame_as_large_as_the_receive_buffer(is_buffer: bool) -> None:
    for size in [0, *range(CAPACITY - 26, CAPACITY + 2)]:
        body = bytes(range(256))[:size]
        frame = Frame(1, 2, 3, b"" if is_buffer else body, [body] if is_buffer else [])
        assert feed(new_parser(), encoded(frame) * 3, [1000]) == [frame] * 3


def test_a_frame_without_anything() -> None:
    frame = Frame(0, 0, 0, b"", [])
    assert feed(new_parser(), encoded(frame), [HEADER_BYTES]) == [frame]


def test_only_empty_buffers_of_a_large_frame() -> None:
    frame = Frame(1, 0, 0, b"c" * 100, [b"", b"", b"x", b""])
    assert feed(new_parser(), encoded(frame), [7]) == [frame]


@pytest.mark.parametrize("count", [9, 9_000])
def test_more_buffers_than_their_lengths_fit_the_receive_buffer(count: int) -> None:
    many = Frame(1, 0, 0, b"control", [b"ab"] * count)
    few = Frame(2, 0, 0, b"", [b"c"])
    stream = encoded(few) + encoded(many) + encoded(few)
    parser = new_parser(frame_limit=1 << 20)
    assert feed(parser, stream, [50_000]) == [few, many, few]
    assert feed(parser, stream, [2 << 20]) == [few, many, few]


def test_more_buffers_than_fit_a_frame_are_refused_at_the_sender() -> None:
    with pytest.raises(ProtocolError, match="at most 65535"):
        encode_frame(1, 0, 0, b"", [memoryview(b"")] * (MAX_BUFFERS + 1))


def test_a_large_frame_goes_straight_into_allocated_memory() -> None:
    memory = Memory()
    frame = Frame(1, 0, 0, b"control", [b"x" * 500, b"", b"y" * 400])
    assert feed(new_parser(memory), encoded(frame), [33]) == [frame]
    assert memory.taken_bytes == 900


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


def test_a_frame_without_buffers_is_within_the_frame_limit_too() -> None:
    parser = new_parser(control_limit=FRAME_LIMIT * 2)
    with pytest.raises(ProtocolError, match="control part of 1985 bytes; the limit is 1984"):
        feed(parser, HEADER.pack(1, 0, 0, FRAME_LIMIT - HEADER_BYTES + 1, 0), [100])


def test_received_parts_do_not_change_with_what_comes_later() -> None:
    parser = new_parser()
    first = parser_frames(parser, Frame(1, 0, 0, b"first", [b"1"]))
    parser_frames(parser, Frame(1, 0, 0, b"other", [b"2"]))
    assert plain(first[0]) == Frame(1, 0, 0, b"first", [b"1"])


def parser_frames(parser: FrameParser, frame: Frame) -> list[Frame]:
    data = encoded(frame)
    parser.space()[0][: len(data)] = data
    return parser.received(len(data))


def test_a_control_part_beyond_the_limit_is_refused() -> None:
    parser = new_parser()
    header = HEADER.pack(1, 0, 0, CONTROL_LIMIT + 1, 0)
    with pytest.raises(ProtocolError, match="control part of 1001 bytes"):
        feed(parser, header, [100])


@pytest.mark.parametrize("lengths", [[FRAME_LIMIT], [2**64 - 1], [2**63, 2**63]])
def test_a_frame_beyond_the_limit_is_refused_before_memory_is_taken(lengths: list[int]) -> None:
    memory = Memory()
    head = HEADER.pack(1, 0, len(lengths), 0, 0) + struct.pack(f"<{len(lengths)}Q", *lengths)
    with pytest.raises(ProtocolError, match="the limit is 2000"):
        feed(new_parser(memory), head, [100])
    assert memory.taken_bytes == 0


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                HEADER.pack,
                st.just(1),
                st.just(0),
                st.integers(0, 3),
                st.integers(0, CONTROL_LIMIT + 10),
                st.just(0),
            ),
            st.integers(0, FRAME_LIMIT).map(lambda length: length.to_bytes(8, "little")),
        ),
        max_size=8,
    ),
    st.integers(1, 90),
)
def test_any_bytes_are_frames_or_refused(pieces: list[bytes], size: int) -> None:
    memory = Memory()
    parser = new_parser(memory)
    stream = b"".join(pieces)
    try:
        received = feed(parser, stream, [size])
    except ProtocolError:
        received = []
    else:
        assert stream.startswith(b"".join(map(encoded, received)))
    # Complete frames, and one incomplete frame.
    assert memory.taken_bytes <= len(stream) + FRAME_LIMIT


def test_random_streams_of_a_thousand_frames() -> None:
    chance = random.Random(5)
    sent = [
        Frame(
            chance.randrange(256),
            0,
            number,
            chance.randbytes(chance.choice((0, 3, 40, 60, 200))),
            [chance.randbytes(chance.choice((0, 1, 30, 90))) for _ in range(chance.randrange(4))],
        )
        for number in range(1000)
    ]
    sizes = [chance.choice((1, 5, 16, 64, 1000)) for _ in range(997)]
    assert feed(new_parser(), b"".join(map(encoded, sent)), sizes) == sent
