from __future__ import annotations

import contextlib
import mmap
import socket
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import pytest

from tests.unit.engine.io.reading import not_main, reading, received  # noqa: F401
from tests.unit.engine.io.secure.meeting import tcp_pair
from torchweft import knobs
from torchweft.engine.io import link
from torchweft.engine.io.link import Link, LinkClosed
from torchweft.engine.io.ring import MEMORY_BYTES, Ring
from torchweft.engine.threads import interrupts
from torchweft.engine.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.errors import ProtocolError
from torchweft.native import native

pytestmark = pytest.mark.usefixtures("not_main")

BIG_BYTES = 8 << 20
LIMIT_S = 20.0


class End(NamedTuple):
    """A link, and an event that is set when its socket is full."""

    link: Link
    is_full: threading.Event


def new_end(connection: socket.socket, twin: str, ring: Ring | None = None) -> End:
    is_full = threading.Event()
    parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, 1 << 24, 1 << 26)
    with links_of(twin):
        return End(Link(connection, parser, lambda link: is_full.set(), ring), is_full)


@contextlib.contextmanager
def links_of(twin: str) -> Iterator[None]:
    """Gives links that are made in the block a twin, and the limits of the parsers here."""
    with (
        mock.patch.object(link, "native", None if twin == "plain" else native),
        knobs.RECEIVE_BUFFER_BYTES.override(4096),
        knobs.CONTROL_LIMIT_BYTES.override(1 << 24),
        knobs.FRAME_LIMIT_BYTES.override(1 << 26),
    ):
        yield


@pytest.fixture(params=["unix", "tcp", "ring"])
def ends(request: pytest.FixtureRequest, twin: str) -> Iterator[tuple[End, End]]:
    rings: tuple[Ring | None, Ring | None] = None, None
    if request.param == "ring":
        if twin == "plain":
            pytest.skip("the plain twin offers no ring")
        memory = mmap.mmap(-1, MEMORY_BYTES)
        rings = Ring(memory, True), Ring(memory, False)
    first, second = tcp_pair() if request.param == "tcp" else socket.socketpair()
    one, other = new_end(first, twin, rings[0]), new_end(second, twin, rings[1])
    yield one, other
    one.link.close()
    other.link.close()


def frame_parts(number: int, control: bytes = b"", *buffers: bytes) -> list[Buffer]:
    return encode_frame(1, 0, number, control, [memoryview(buffer) for buffer in buffers])


def read_frames(link: Link, count: int) -> list[Frame]:
    frames: list[Frame] = []
    with reading(link):
        while len(frames) < count:
            frames += received(link, may_block=True)
    return frames


def send_bytes(link: Link, *pieces: bytes) -> threading.Thread:
    """Has another thread write bytes that are no whole frames."""

    def write() -> None:
        for piece in pieces:
            is_written = link._stream.write((piece,))
            while not is_written:
                time.sleep(0.0001)
                is_written = link._stream.write(())

    writer = threading.Thread(target=write)
    writer.start()
    return writer


class Reader(threading.Thread):
    """Reads a number of frames in a thread of its own."""

    def __init__(self, link: Link, count: int) -> None:
        super().__init__(name="reader")
        self._link, self._count = link, count
        self.frames: list[Frame] = []
        self.start()

    def run(self) -> None:
        self.frames = read_frames(self._link, self._count)

    def result(self) -> list[Frame]:
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self.frames


def test_a_thread_that_must_not_block_leaves_the_rest_to_flush(ends: tuple[End, End]) -> None:
    one, other = ends
    big = b"x" * BIG_BYTES
    one.link.send(frame_parts(1, b"", big, b"y" * 100), may_block=False)
    assert one.link.has_queued
    one.link.send(frame_parts(2, b"queued behind"), may_block=False)
    one.link.send(frame_parts(3, b"queued behind, by one that may block"), may_block=True)
    reader = Reader(other.link, 3)
    flush_until_written(one)
    first, *others = reader.result()
    assert [bytes(buffer) for buffer in first.buffers] == [big, b"y" * 100]
    assert [frame.id for frame in others] == [2, 3]
    assert one.link.bytes_sent == other.link.bytes_received


def test_one_read_waits_for_the_rest_of_a_large_frame(ends: tuple[End, End]) -> None:
    one, other = ends
    data = b"".join(frame_parts(1, b"", b"x" * 300_000))
    first = send_bytes(one.link, data[:10_000])
    with reading(other.link):
        while other.link.parser.large is None:
            assert received(other.link, may_block=False) == []
        while other.link.bytes_received < 10_000:
            received(other.link, may_block=False)
        first.join(LIMIT_S)
        pieces = [data[start : start + 50_000] for start in range(10_000, len(data), 50_000)]
        writer = send_bytes(one.link, *pieces)
        frames = received(other.link, may_block=True)
        writer.join(LIMIT_S)
    assert [bytes(buffer) for buffer in frames[0].buffers] == [b"x" * 300_000]


def test_a_peer_that_stops_within_a_large_frame_holds_a_reader_for_a_tick(
    ends: tuple[End, End],
) -> None:
    one, other = ends
    data = b"".join(frame_parts(1, b"", b"x" * 300_000))
    first = send_bytes(one.link, data[:100_000])
    with reading(other.link):
        while other.link.bytes_received < 100_000:
            assert received(other.link, may_block=True) == []
        first.join(LIMIT_S)
        began_s = time.monotonic()
        assert received(other.link, may_block=True) == []
        assert time.monotonic() - began_s < LIMIT_S / 4
        rest = send_bytes(one.link, data[100_000:])
        assert len(received(other.link, may_block=True)) == 1
        rest.join(LIMIT_S)


def flush_until_written(end: End) -> None:
    """Flushes the link as the reactor does; the thread that reads writes the rest to a ring."""
    while end.link.has_queued:
        if end.is_full.is_set():
            end.is_full.clear()
            end.link.flush()
        else:
            with reading(end.link):
                received(end.link, may_block=False)


def test_frames_of_many_threads_stay_whole(ends: tuple[End, End]) -> None:
    one, other = ends
    threads_count, each = 6, 60
    done = threading.Event()

    def write(writer: int) -> None:
        for number in range(each):
            tag = bytes([writer])
            sizes = (number % 7) * 1000, 90_000 if number % 20 == 0 else 10
            parts = frame_parts(writer * 1000 + number, tag * 5, *(tag * size for size in sizes))
            one.link.send(parts, may_block=bool(number % 2))

    def flush() -> None:
        while not done.wait(0.001):
            flush_until_written(one)

    reader = Reader(other.link, threads_count * each)
    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(threads_count)]
    flusher = threading.Thread(target=flush)
    for thread in (*writers, flusher):
        thread.start()
    for thread in writers:
        thread.join(LIMIT_S)
    frames = reader.result()
    done.set()
    flusher.join(LIMIT_S)
    check_whole(frames, threads_count, each)


def check_whole(frames: list[Frame], threads_count: int, each: int) -> None:
    for writer in range(threads_count):
        own = [frame for frame in frames if frame.id // 1000 == writer]
        assert [frame.id % 1000 for frame in own] == list(range(each))
        for frame in own:
            parts = (frame.control, *frame.buffers)
            assert all(bytes(part) == bytes([writer]) * len(part) for part in parts)


def test_hanging_up_wakes_a_reader_and_a_writer(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[End, End]
) -> None:
    # The writer must still wait when this thread gets a core again.
    monkeypatch.setattr("torchweft.engine.io.link.SEND_PATIENCE_S", LIMIT_S)
    link = ends[0].link
    has_begun, errors = threading.Event(), []

    def write() -> None:
        has_begun.set()
        with pytest.raises(LinkClosed) as caught:
            link.send([b"x" * BIG_BYTES, b"y" * BIG_BYTES], may_block=True)
        errors.append(caught.value)

    def read() -> None:
        with pytest.raises(LinkClosed) as caught:
            read_frames(link, 1)
        errors.append(caught.value)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(LIMIT_S)
    link.hang_up()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(errors) == 2


def test_drain_waits_until_the_last_byte_is_written(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.send(frame_parts(1, b"x" * BIG_BYTES), may_block=False)
    reader = Reader(other.link, 1)
    flusher = threading.Thread(target=flush_until_written, args=(one,))
    flusher.start()
    one.link.drain(LIMIT_S)
    assert one.link.bytes_sent == len(frame_parts(1, b"x" * BIG_BYTES)[0])
    flusher.join(LIMIT_S)
    reader.result()


def test_drain_gives_up_in_time_where_nobody_reads(ends: tuple[End, End]) -> None:
    one, _ = ends
    one.link.send(frame_parts(1, b"x" * BIG_BYTES), may_block=False)
    one.link.drain(0.02)
    assert one.link.bytes_sent < BIG_BYTES


def test_what_is_no_frame_is_refused(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.send([b"\xff" * 100], may_block=False)
    with reading(other.link), pytest.raises(ProtocolError):
        received(other.link, may_block=True)


@pytest.mark.parametrize("limits", [(100, 1 << 26), (1 << 24, 100)])
def test_a_frame_that_fits_the_buffer_may_exceed_a_limit(
    limits: tuple[int, int], twin: str
) -> None:
    ours, theirs = socket.socketpair()
    parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, *limits)
    with (
        links_of(twin),
        knobs.CONTROL_LIMIT_BYTES.override(limits[0]),
        knobs.FRAME_LIMIT_BYTES.override(limits[1]),
    ):
        link = Link(ours, parser, lambda link: None)
    with theirs, reading(link):
        theirs.sendall(b"".join(frame_parts(1, b"c" * 80)))
        assert [frame.id for frame in received(link, may_block=False)] == [1]
        theirs.sendall(b"".join(frame_parts(2, b"c" * 101)))
        with pytest.raises(ProtocolError, match="announces"):
            received(link, may_block=False)
    link.close()


def test_the_rest_of_a_frame_comes_before_what_others_queue(ends: tuple[End, End]) -> None:
    one, other = ends
    one.link.send(frame_parts(1, b"z" * BIG_BYTES), may_block=False)
    sender = threading.Thread(
        target=one.link.send, args=(frame_parts(2, b"second"),), kwargs={"may_block": False}
    )
    sender.start()
    sender.join(LIMIT_S)
    reader = Reader(other.link, 2)
    flush_until_written(one)
    first, second = reader.result()
    assert bytes(first.control) == b"z" * BIG_BYTES
    assert bytes(second.control) == b"second"


def test_who_may_block_does_not_wait_for_ever_for_a_peer_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, twin: str
) -> None:
    monkeypatch.setattr(link, "SEND_PATIENCE_S", 0.01)
    for pair in (socket.socketpair(), tcp_pair()):
        one, other = (new_end(connection, twin) for connection in pair)
        one.link.send(frame_parts(1, b"z" * BIG_BYTES), may_block=True)
        assert one.is_full.is_set()
        reader = Reader(other.link, 1)
        flush_until_written(one)
        (frame,) = reader.result()
        assert bytes(frame.control) == b"z" * BIG_BYTES
        one.link.close()
        other.link.close()


def test_the_main_thread_leaves_a_message_to_the_reactor_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "main_id", threading.get_ident())
    one, other = (new_end(connection, "plain") for connection in socket.socketpair())

    def fail(_: float) -> None:
        raise AssertionError("it waits")

    def send(count: int) -> None:
        for _ in range(count):
            one.link.send(frame_parts(1, b"message"), may_block=True)

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", fail)
        send(1)
        assert one.is_full.is_set()
        with pytest.raises(AssertionError, match="it waits"):
            send(100)  # The reactor is far behind.
    one.link.close()
    other.link.close()
