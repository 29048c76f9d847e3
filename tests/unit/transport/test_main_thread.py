"""The main thread writes and reads a session itself, and may be interrupted at any step.

The signal handler may take long: meanwhile another thread replaces the connection. Nothing may be
lost by that, nor come twice.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import socket
import threading
from collections.abc import Callable

import pytest

from tests.interrupting import interrupt_at
from tests.thorough import every
from tests.unit.agent.group import wait_until
from tests.unit.transport.reading import reading
from tests.unit.transport.test_link import HalfTaking
from tests.unit.transport.test_resumable import (
    FRAMES,
    LIMIT_S,
    STREAM,
    End,
    as_bytes,
    frame_parts,
)
from torchweft.agent.calls import READING, MainReader
from torchweft.transport.link import Link
from torchweft.wire.frames import Frame, FrameParser, encode_frame
from torchweft.wire.messages import Kind, encode_ints

MESSAGE = FRAMES[1]
SAID = [frame_parts(number, b"x" * number) for number in range(20)]


class PlainEnd(End):
    """A link that is no session's, connected to a plain socket."""

    def __init__(self) -> None:
        self.is_full = threading.Event()
        ours, self.other = socket.socketpair()
        parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, 1 << 24, 1 << 26)
        self.link = Link(ours, parser, lambda link: self.is_full.set())  # type: ignore[assignment]


def elsewhere(function: Callable[[], object]) -> None:
    """Runs a function in another thread, and waits for its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the other thread waits for the main thread"


def rest_of(connection: socket.socket) -> bytes:
    """Reads a connection that the link has ended."""
    connection.settimeout(LIMIT_S)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def write_what_is_left(end: End) -> None:
    if end.is_full.is_set():
        elsewhere(end.link.flush)


def test_messages_of_the_main_thread_need_no_other_thread() -> None:
    with contextlib.closing(End()) as end:
        for frame in FRAMES:
            end.link.send(frame, may_block=True)
        assert not end.is_full.is_set()
        assert end.arrived(len(STREAM)) == STREAM


def test_other_threads_go_on_behind_messages_of_the_main_thread() -> None:
    with contextlib.closing(End()) as end:
        for frame in FRAMES[::2]:
            end.link.send(frame, may_block=True)
        elsewhere(lambda: end.link.send(FRAMES[3], may_block=True))
        expected = as_bytes(FRAMES[0], FRAMES[2], FRAMES[3])
        assert end.arrived(len(expected)) == expected
        end.reconnect(0)
        assert end.arrived(len(expected)) == expected


@pytest.mark.parametrize("connect", [PlainEnd, End])
def test_the_main_thread_ends_its_write_while_another_thread_looks_at_it(
    connect: type[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(connect()) as end:
        end.link.hold(FRAMES[0])
        # ``_may_begin`` at each look of the other thread: the write ends before the third.
        looks = iter([[0], [0]])
        may_begin = property(lambda link: next(looks, None), lambda link, value: None)
        monkeypatch.setattr(Link, "_may_begin", may_begin, raising=False)
        elsewhere(lambda: end.link.send(MESSAGE, may_block=False))
        expected = as_bytes(FRAMES[0], MESSAGE)
        assert end.arrived(len(expected)) == expected


def test_the_rest_of_a_frame_comes_before_what_the_main_thread_queues() -> None:
    with contextlib.closing(PlainEnd()) as end:
        link, goes_on, is_half = end.link, threading.Lock(), threading.Event()
        # Where the main thread has queued it, ``_begin`` waits before it goes on.
        goes_on.acquire()
        message = itertools.chain(MESSAGE, filter(operator.not_, map(goes_on.acquire, [True])))

        def await_message() -> None:
            is_half.set()
            wait_until(lambda: len(link._queue) == len(MESSAGE))

        def send() -> None:
            try:
                link.send(FRAMES[0], may_block=False)
            finally:
                goes_on.release()

        link._socket = HalfTaking(link._socket, await_message)  # type: ignore[assignment]
        other = threading.Thread(target=send)
        other.start()
        assert is_half.wait(LIMIT_S)
        link.send(message, may_block=False)  # type: ignore[arg-type]
        other.join(LIMIT_S)
        write_what_is_left(end)
        expected = as_bytes(FRAMES[0], MESSAGE)
        assert end.arrived(len(expected)) == expected


def test_a_message_for_which_there_is_no_room_is_written_on_by_flushing() -> None:
    with contextlib.closing(End()) as end:
        parts = frame_parts(1, b"", b"b" * (16 << 20))
        end.link.send(parts, may_block=False)
        assert end.is_full.is_set()
        end.link.send(FRAMES[0], may_block=False)

        def flush() -> None:
            while end.is_full.wait(0.2):
                end.is_full.clear()
                end.link.flush()

        flusher = threading.Thread(target=flush)
        flusher.start()
        expected = as_bytes(parts, FRAMES[0])
        assert end.arrived(len(expected)) == expected
        flusher.join(LIMIT_S)


def test_the_connection_may_be_replaced_at_any_step_of_a_write() -> None:
    expected, step = as_bytes(FRAMES[0], MESSAGE, FRAMES[2]), 1
    while replaces_during_a_write(step, expected):
        step += every(1)


def replaces_during_a_write(step: int, expected: bytes) -> bool:
    with contextlib.closing(End()) as end:
        came = b""

        def replace() -> None:
            nonlocal came
            end.link.stop()
            came = rest_of(end.other)
            end.reconnect(len(came))

        end.link.send(FRAMES[0], may_block=False)
        reached = interrupt_at(
            step,
            lambda: end.link.send(MESSAGE, may_block=False),
            lambda: elsewhere(replace),
        )
        write_what_is_left(end)
        end.link.send(FRAMES[2], may_block=False)
        write_what_is_left(end)
        assert came + end.arrived(len(expected) - len(came)) == expected, f"step {step}"
    return reached


def test_a_message_of_the_handler_goes_out_at_any_step_of_a_write() -> None:
    step, is_reached = 1, True
    while is_reached:
        with contextlib.closing(End()) as end:

            def send_more(end: End = end) -> None:
                end.link.send(FRAMES[2], may_block=False)
                write_what_is_left(end)

            is_reached = interrupt_at(
                step, lambda end=end: end.link.send(MESSAGE, may_block=False), send_more
            )
            write_what_is_left(end)
            found = end.arrived(len(as_bytes(MESSAGE, *[FRAMES[2]] * is_reached)))
            orders = [MESSAGE, FRAMES[2]], [FRAMES[2], MESSAGE]
            assert found in [as_bytes(MESSAGE), *(as_bytes(*order) for order in orders)], step
        step += every(1)


def test_the_connection_may_be_replaced_at_any_step_of_a_read() -> None:
    step = 1
    while replaces_during_a_read(step):
        step += every(1)


def replaces_during_a_read(step: int) -> bool:
    """The peer sends ten frames; the other ten only over the new connection."""
    stream = as_bytes(*SAID)
    half = len(as_bytes(*SAID[:10]))
    frames: list[Frame] = []
    with contextlib.closing(End()) as end:

        def replace() -> None:
            position = end.link.stop()
            end.reconnect(0)
            end.other.sendall(stream[position:])

        end.other.sendall(stream[:half])
        reached = interrupt_at(
            step, lambda: frames.extend(read_some(end)), lambda: elsewhere(replace)
        )
        if not reached:
            elsewhere(replace)
        while len(frames) < len(SAID):
            frames.extend(read_some(end))
        assert [frame.id for frame in frames] == list(range(len(SAID))), f"step {step}"
        assert end.link.stop() == len(stream)
    return reached


def read_some(end: End) -> list[Frame]:
    """Reads in the main thread; in another one, what the main thread leaves to it."""
    link, reader = end.link, MainReader(READING)
    assert link.readers.setdefault(0, reader) is reader
    frames = link.receive_own(reader, may_block=True)
    if frames:
        consumed: list[int] = []
        link.end_own(frames, reader, consumed)
        assert consumed
    reader.release(link.readers)
    if frames is None:
        frames = []

        def read() -> None:
            with reading(link):
                frames.extend(link.receive(may_block=False))

        elsewhere(read)
    return frames


def test_an_acknowledgement_before_an_answer_leaves_the_answer_to_the_main_thread() -> None:
    with contextlib.closing(End()) as end:
        end.link.send(MESSAGE, may_block=False)
        size = len(as_bytes(MESSAGE))
        said = encode_frame(Kind.ACKNOWLEDGED, 0, 0, encode_ints(size))
        end.other.sendall(as_bytes(said, FRAMES[0]))
        assert [frame.id for frame in read_some(end)] == [1]
        end.link.acknowledge()
        assert end.link._outgoing.acknowledged == size
        assert end.link._incoming.position == len(as_bytes(said, FRAMES[0]))
