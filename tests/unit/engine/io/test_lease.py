"""The right of a thread to read links: what it takes, what it leaves, and how it ends."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.wire.frames import Frame, FrameParser, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import Waiter
from torchweft.errors import ProtocolError
from torchweft.native import native, reason

pytestmark = pytest.mark.skipif(native is None, reason=reason)

LIMIT_S = 20.0
TICK_S = 0.1
"""How long one wait takes at most before it looks whether it is over."""
RECEIVE_BYTES = 4096
CONTROL_LIMIT_BYTES, FRAME_LIMIT_BYTES = 1 << 16, 1 << 18
ANSWERS = 1 << Kind.REPLY
TAKEN, NOTHING, ENDED = 1, 0, -1


class End:
    """A link in C, the other end of its connection, and what is handed to the reactor."""

    def __init__(self) -> None:
        assert native is not None
        self.ours, self.other = socket.socketpair()
        self.incoming: deque[Frame] = deque()
        self.tasks: deque[Any] = deque()
        self.epoll = select.epoll()
        self.epoll.register(self.ours, select.EPOLLIN | select.EPOLLONESHOT)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.link = native.Link(
            self.ours.fileno(),
            self.incoming.append,
            False,
            RECEIVE_BYTES,
            0.0,
        )

    def watch(self) -> End:
        self.link.watch(self.epoll.fileno(), self.wake_fd, self.tasks.append, "look at it")
        return self

    def arrives(self, kind: Kind, number: int, control: bytes = b"") -> None:
        self.other.sendall(encode_frame(kind, 0, number, control)[0])

    @property
    def is_armed(self) -> bool:
        """Whether data would wake a thread of the reactor."""
        self.other.sendall(encode_frame(Kind.CALL, 0, 99, b"")[0])
        return bool(self.epoll.poll(0))

    @property
    def is_read(self) -> bool:
        """Whether a thread has the right to read the link."""
        is_free = self.link.claim()
        if is_free:
            self.link.unclaim()
        return not is_free

    def close(self) -> None:
        self.link.close()
        self.epoll.close()
        os.close(self.wake_fd)
        self.ours.close()
        self.other.close()


@pytest.fixture
def end() -> Iterator[End]:
    made = End().watch()
    yield made
    made.close()


@pytest.fixture
def unwatched() -> Iterator[End]:
    made = End()
    yield made
    made.close()


def begin_of_large(link: Any) -> bytes:
    """Returns what the link in C leaves to the plain parser."""
    space = bytearray(2 * RECEIVE_BYTES)
    size: int = link.fill(space, False)
    return bytes(space[:size])


def lease_of(end: End) -> Any:
    assert native is not None
    return native.Lease.take(end.link)


def wait(lease: Any, into: object, number: int = 7, then: object = None, limit_s: float = 0) -> int:
    result: int = lease.wait(ANSWERS, number, into, then, -1, limit_s, -1)
    return result


class Call:
    frame: Frame | None = None


def test_the_awaited_frame_is_taken_and_the_others_are_handed_over(end: End) -> None:
    lease, taken = lease_of(end), []
    end.arrives(Kind.CALL, 7)
    end.arrives(Kind.REPLY, 8)
    end.arrives(Kind.REPLY, 7, b"answer")
    assert wait(lease, taken) == TAKEN
    (frame,) = taken
    assert (frame.kind, frame.id, bytes(frame.control)) == (Kind.REPLY, 7, b"answer")
    assert [(each.kind, each.id) for each in end.incoming] == [(Kind.CALL, 7), (Kind.REPLY, 8)]
    assert list(end.tasks) == ["look at it"]
    assert os.eventfd_read(end.wake_fd) == 1


def test_a_link_is_not_leased_before_its_frames_can_be_handed_over(unwatched: End) -> None:
    """A peer may be called as soon as it has its link, which is watched a moment later."""
    unwatched.arrives(Kind.CALL, 7)
    assert lease_of(unwatched) is None
    unwatched.watch()
    assert wait(lease_of(unwatched), []) == NOTHING
    assert list(unwatched.tasks) == ["look at it"]


def test_a_lease_keeps_the_link_from_waking_others(end: End) -> None:
    lease = lease_of(end)
    assert not end.is_armed
    lease.release()
    assert end.is_armed


def test_the_end_of_a_thread_gives_its_links_back(end: End) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: lease_of(end) and None).result()
    assert not end.is_read
    assert end.is_armed


def test_who_waits_again_ends_the_lease_before(end: End) -> None:
    """As a signal handler or a finalizer does, in the same thread."""
    outer = lease_of(end)
    inner, taken = lease_of(end), []
    end.arrives(Kind.REPLY, 7)
    end.arrives(Kind.REPLY, 8)
    assert wait(outer, [], 7) == ENDED
    assert wait(inner, taken, 8) == TAKEN
    assert [frame.id for frame in taken] == [8]
    assert [each.id for each in end.incoming] == [7]
    outer.release()
    assert end.is_read
    inner.release()
    assert end.is_armed


def test_an_answer_that_was_taken_owes_its_task_until_it_is_settled(end: End) -> None:
    for is_settled in (True, False):
        lease, call = lease_of(end), Call()
        end.arrives(Kind.REPLY, 7)
        assert wait(lease, call, then="complete it") == TAKEN
        assert call.frame is not None
        if is_settled:
            lease.settle()
        lease.release()
        assert list(end.tasks) == [] if is_settled else ["complete it"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,  # What is no frame.
        encode_frame(Kind.REPLY, 0, 7, b"x" * 10_000)[0],  # What is too large for the buffer.
    ],
)
def test_what_another_thread_has_to_read_ends_the_wait(end: End, data: bytes) -> None:
    lease = lease_of(end)
    end.other.sendall(data)
    assert wait(lease, [], limit_s=1e9) == ENDED
    lease.release()
    assert list(end.tasks) == ["look at it"]


@pytest.mark.keeps("threads")
def test_an_exception_of_a_handler_ends_the_wait_and_loses_nothing(end: End) -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        assert not end.is_read, "the reactor does not read while a handler runs"
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    lease = lease_of(end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Alarm):
            assert [wait(lease, [], limit_s=1e9) for _ in range(1000)] == []
    finally:
        signal.signal(signal.SIGALRM, before)
    lease.release()
    lease, taken = lease_of(end), []
    end.arrives(Kind.REPLY, 7)
    assert wait(lease, taken) == TAKEN


@pytest.mark.keeps("threads")
def test_what_the_reactor_reads_while_handlers_run_ends_the_wait(end: End) -> None:
    """However many signals come: the wait has to be asked whether it is over."""

    has_come: list[bool] = []

    def handler(*_: object) -> None:
        if not has_come:
            has_come.append(True)  # First: the next signal may interrupt this handler.
            end.arrives(Kind.REPLY, 7)
            assert end.link.claim()
            end.link.read(False)
            end.link.unclaim()

    before = signal.signal(signal.SIGALRM, handler)
    lease, over = lease_of(end), threading.Timer(LIMIT_S, end.other.close)
    over.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.001)
        assert wait(lease, [], limit_s=1e9) == NOTHING
        assert [each.id for each in end.incoming] == [7]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.cancel()
        over.join()


def test_a_wait_ends_in_time_while_messages_for_others_come(end: End) -> None:
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(TICK_S / 20):
            end.arrives(Kind.CALL, 8)

    lease, sending = lease_of(end), threading.Thread(target=send)
    sending.start()
    try:
        assert wait(lease, [], limit_s=1e9) == NOTHING
        assert end.incoming
    finally:
        is_over.set()
        sending.join()


def test_a_link_is_not_leased_while_another_thread_handles_what_was_read(end: End) -> None:
    # The message that the thread will wait for may be what the other thread has in hand.
    link: Any = SimpleNamespace(native=end.link, incoming=end.incoming, handling=threading.Lock())
    reactor: Any = SimpleNamespace()
    waiter = Waiter(reactor)
    peers: list[Any] = [SimpleNamespace(link=link)]
    end.incoming.append(Frame(Kind.REPLY, 0, 7, b"", ()))  # Read, and not yet taken up.
    assert waiter.lease(peers) is None
    with link.handling:  # Taken up.
        end.incoming.clear()
        assert waiter.lease(peers) is None
    lease = waiter.lease(peers)
    assert lease is not None
    lease.release()


FRAMES = st.lists(
    st.tuples(
        st.integers(0, 31),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=300),
        st.lists(st.binary(max_size=300), max_size=4),
    ),
    max_size=8,
)


def parsed(data: bytes, cuts: list[int]) -> tuple[list[Frame], str]:
    """Returns the frames that the parser in Python cuts, and its error."""
    parser = FrameParser(
        lambda size: memoryview(bytearray(size)),
        RECEIVE_BYTES,
        CONTROL_LIMIT_BYTES,
        FRAME_LIMIT_BYTES,
    )
    frames: list[Frame] = []
    try:
        for piece in pieces(data, cuts):
            while piece:
                space = parser.space()[0]
                size = min(len(space), len(piece))
                space[:size], piece = piece[:size], piece[size:]
                frames += parser.received(size)
    except ProtocolError as error:
        return frames, str(error)
    return frames, ""


def cut(data: bytes, cuts: list[int]) -> tuple[list[Frame], bytes]:
    """Returns the frames that the link in C cuts, and the data that it leaves to the parser."""
    end = End()
    try:
        for at, piece in enumerate(cut_up := pieces(data, cuts)):
            end.other.sendall(piece)
            while end.link.read(False):
                pass
            if end.link.is_large:
                return list(end.incoming), begin_of_large(end.link) + b"".join(cut_up[at + 1 :])
        return list(end.incoming), b""
    finally:
        end.close()


def pieces(data: bytes, cuts: list[int]) -> list[memoryview]:
    places = [0, *sorted(each % (len(data) + 1) for each in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in itertools.pairwise(places)]


def plain(frames: list[Frame]) -> list[Any]:
    return [
        (*frame[:3], bytes(frame.control), [bytes(each) for each in frame.buffers])
        for frame in frames
    ]


@settings(max_examples=examples(200))
@given(FRAMES, st.lists(st.integers(0, 10_000), max_size=5))
def test_both_twins_cut_the_same_frames(frames: list[Any], cuts: list[int]) -> None:
    data = b"".join(
        bytes(part)
        for kind, number, control, buffers in frames
        for part in encode_frame(kind, 0, number, control, [memoryview(each) for each in buffers])
    )
    ours, left = cut(data, cuts)
    theirs, _ = parsed(data, cuts)
    assert left == b""
    assert plain(ours) == plain(theirs)
    assert len(ours) == len(frames)


@settings(max_examples=examples(400))
@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=3))
def test_both_twins_refuse_the_same_bytes(data: bytes, cuts: list[int]) -> None:
    ours, left = cut(data, cuts)
    theirs, error = parsed(data, cuts)
    rest, rest_error = parsed(left, [])
    assert rest_error == error
    if not error:  # The parser drops the frames that it has cut before.
        assert plain([*ours, *rest]) == plain(theirs)
