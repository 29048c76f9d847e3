"""A ring in shared memory: its bytes, its flags, its end, and a peer that writes garbage to it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.io import ring
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.native import native, reason

pytestmark = pytest.mark.skipif(native is None, reason=reason)

HEAD_BYTES = 256
RING_BYTES = 61
"""Less than some frames, and its end is no multiple of anything."""
WRITTEN, READ, READER_SLEEPS, WRITER_WAITS = 0, 64, 128, 192
GARBAGE = (0, 1, RING_BYTES, RING_BYTES + 1, 1 << 31, 1 << 63, (1 << 64) - 1)


class Side:
    """A link in C over a ring, as the reactor watches it."""

    def __init__(self, connection: socket.socket, memory: mmap.mmap, is_first: bool) -> None:
        assert native is not None
        self.socket, self.memory = connection, memory
        self.out, self.into = HEAD_BYTES * (not is_first), HEAD_BYTES * is_first
        self.out_bytes = 2 * HEAD_BYTES + RING_BYTES * (not is_first)
        self.frames: deque[Frame] = deque()
        self.epoll = select.epoll()
        self.epoll.register(connection, select.EPOLLIN | select.EPOLLONESHOT)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.link: Any = native.Link(
            connection.fileno(), self.frames.append, False, 4096, 0.0, memory, is_first
        )
        self.tasks: list[object] = []
        self.link.watch(self.epoll.fileno(), self.wake_fd, self.tasks.append, "look at it")

    def arrives(self, number: int, control: bytes = b"") -> bool:
        """Writes a frame; returns whether all of it found room."""
        return bool(self.link.write([frame(number, control)]))

    def read(self) -> list[int]:
        """Reads as a thread that an event has brought; returns the numbers of the frames."""
        assert self.link.claim()
        if self.link.awaits_room:
            self.link.write(())
        try:
            self.link.read(False)
        finally:
            self.link.unclaim()
        return [self.frames.popleft().id for _ in range(len(self.frames))]

    def read_into(self, found: list[bytes]) -> None:
        """Reads, and adds the control parts of the frames."""
        assert self.link.claim()
        self.link.read(False)
        self.link.unclaim()
        found += [bytes(self.frames.popleft().control) for _ in range(len(self.frames))]

    @property
    def is_woken(self) -> bool:
        """Whether the reactor is told of something now."""
        return bool(self.epoll.poll(0))

    @property
    def bells(self) -> int:
        """How many bells wait at the socket."""
        try:
            return len(self.socket.recv(64, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return 0

    def set(self, offset: int, value: int) -> None:
        """Sets a field of the memory as the peer may."""
        size_bytes, form = (8, "<Q") if offset % HEAD_BYTES < READER_SLEEPS else (4, "<I")
        self.memory[offset : offset + size_bytes] = struct.pack(form, value % (1 << 8 * size_bytes))

    def close(self) -> None:
        self.link.close()
        self.link.close()
        self.epoll.close()
        os.close(self.wake_fd)
        self.socket.close()


def frame(number: int, control: bytes = b"") -> bytes:
    return b"".join(encode_frame(Kind.REPLY, 0, number, control))


def pair() -> tuple[Side, Side]:
    memory = mmap.mmap(-1, 2 * (HEAD_BYTES + RING_BYTES))
    first, second = socket.socketpair()
    return Side(first, memory, True), Side(second, memory, False)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    made = pair()
    yield made
    for each in made:
        each.close()


# Bytes


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=90), st.integers(0, 3)), max_size=20))
def test_frames_of_any_size_go_around_the_end_of_the_ring(
    messages: list[tuple[bytes, int]],
) -> None:
    one, other = pair()
    found: list[bytes] = []
    try:
        for number, (control, reads) in enumerate(messages):
            one.arrives(number, control)
            for _ in range(reads):
                other.read_into(found)
                one.link.write(())
        while one.link.queued:
            other.read_into(found)
            one.link.write(())
        other.read_into(found)
    finally:
        one.close()
        other.close()
    assert found == [control for control, _ in messages]


def test_bytes_count_as_sent_before_the_peer_can_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "RING_BYTES", 1 << 20)
    one, other = pair()
    content = frame(1, bytes(1 << 19))  # So long that the copy lets other threads of Python run.
    writer = threading.Thread(target=one.link.write, args=([content],))
    at = one.out + WRITTEN
    writer.start()
    limit_s = time.monotonic() + 20.0
    while one.memory[at : at + 8] == bytes(8):
        assert time.monotonic() < limit_s
    sent = one.link.bytes_sent
    writer.join()
    assert sent == len(content)
    one.close()
    other.close()


# Flags


def test_a_reader_that_sleeps_is_rung_once(sides: tuple[Side, Side]) -> None:
    one, other = sides
    other.link.arm()
    assert one.arrives(1)
    assert one.arrives(2)
    assert (other.bells, other.is_woken) == (1, True)
    assert other.read() == [1, 2]
    assert other.bells == 0


def test_a_lease_is_not_rung_while_it_looks_and_arms_at_its_end(sides: tuple[Side, Side]) -> None:
    one, other = sides
    assert native is not None
    other.link.arm()
    lease = native.Lease.take(other.link)
    assert one.arrives(7)
    assert (other.bells, other.is_woken) == (0, False)
    taken: list[Any] = []
    assert lease.wait(1 << Kind.REPLY, 7, taken, None, -1, 0, -1) == 1
    lease.release()
    assert one.arrives(8)
    assert other.is_woken


def test_a_thread_that_an_event_brought_arms_although_a_lease_has_read_the_data(
    sides: tuple[Side, Side],
) -> None:
    """Between the event and the thread's first step, a lease takes what the event was for."""
    one, other = sides
    assert native is not None
    other.link.arm()
    assert one.arrives(7)
    assert other.is_woken
    lease = native.Lease.take(other.link)
    assert lease.wait(1 << Kind.REPLY, 7, [], None, -1, 0, -1) == 1
    lease.release()
    other.link.arm()
    assert other.bells == 1
    assert other.is_woken
    assert other.read() == []
    other.link.arm()
    assert not other.is_woken
    assert one.arrives(8)
    assert other.is_woken


def test_a_lease_that_sleeps_is_woken_and_the_reactor_is_not(sides: tuple[Side, Side]) -> None:
    one, other = sides
    assert native is not None
    other.link.arm()
    lease = native.Lease.take(other.link)
    assert lease.wait(1 << Kind.REPLY, 7, [], None, -1, 1e-3 + time.monotonic(), -1) == 0
    assert one.arrives(7)
    assert not other.is_woken
    taken: list[Any] = []
    assert lease.wait(1 << Kind.REPLY, 7, taken, None, -1, 20 + time.monotonic(), -1) == 1
    lease.release()


def test_the_reader_writes_the_rest_when_there_is_room(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.link.arm()
    assert not one.arrives(1, b"x" * 150)
    assert not one.is_woken
    other.read()
    assert (one.bells, one.is_woken) == (1, True)
    one.read()
    assert one.link.queued
    other.read()
    one.read()
    assert not one.link.queued
    assert other.read() == [1]


def test_a_lease_leaves_the_rest_to_the_reactor(sides: tuple[Side, Side]) -> None:
    one, other = sides
    assert native is not None
    lease = native.Lease.take(one.link)
    assert not one.arrives(1, b"x" * 100)
    assert lease.wait(1 << Kind.REPLY, 7, [], None, -1, 0, -1) == 0
    other.read()
    assert lease.wait(1 << Kind.REPLY, 7, [], None, -1, 20 + time.monotonic(), -1) == -1
    assert one.tasks == []
    lease.release()
    assert one.tasks == ["look at it"]
    one.read()
    assert other.read() == [1]


# The end


def test_what_was_published_before_the_end_is_read(sides: tuple[Side, Side]) -> None:
    one, other = sides
    assert one.arrives(1)
    assert one.arrives(2)
    one.socket.shutdown(socket.SHUT_RDWR)
    assert other.link.claim()
    assert other.link.read(False) == 2
    assert other.link.read(False) is None


@pytest.mark.parametrize("published", range(len(frame(1, b"control")) + 1))
def test_a_writer_killed_at_any_byte_leaves_a_whole_frame_or_none(
    sides: tuple[Side, Side], published: int
) -> None:
    """The bytes are copied, some of them are published, no bell rings, and the process ends."""
    one, other = sides
    data = frame(1, b"control")
    one.memory[one.out_bytes : one.out_bytes + len(data)] = data
    one.set(one.out + WRITTEN, published)
    one.socket.shutdown(socket.SHUT_RDWR)
    assert other.link.claim()
    count = other.link.read(False)
    is_whole = published == len(data)
    assert (count, len(other.frames)) == (is_whole if published else None, is_whole)
    assert other.link.read(False) is None


class Stepped:
    """A process that carries out one step of a link an instruction at a time.

    The memory and the socket are all that it leaves behind, so what they hold between two
    instructions is what a process leaves that is killed there.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._pid = os.fork()
        if not self._pid:
            self._libc.ptrace(0, 0, None, None)  # PTRACE_TRACEME
            os.kill(os.getpid(), signal.SIGSTOP)
            action()
            os._exit(0)
        os.waitpid(self._pid, 0)

    def steps(self) -> Iterator[None]:
        """Yields between two instructions, until the process has ended."""
        while self._libc.ptrace(9, self._pid, None, None) == 0:  # PTRACE_SINGLESTEP
            _, status = os.waitpid(self._pid, 0)
            if os.WIFEXITED(status):
                assert os.waitstatus_to_exitcode(status) == 0
                return
            yield
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        pytest.skip("this system does not let a process be traced")


@pytest.mark.parametrize("control_bytes", [7, 90])
@pytest.mark.parametrize("sleeps", [False, True])
def test_a_writer_killed_at_any_instruction_leaves_a_whole_frame_or_none(
    sides: tuple[Side, Side], sleeps: bool, control_bytes: int
) -> None:
    one, other = sides
    if sleeps:
        other.link.arm()
    states: dict[tuple[bytes, int], None] = {}
    for _ in Stepped(lambda: one.arrives(1, b"c" * control_bytes)).steps():
        states[bytes(one.memory), other.bells] = None
    assert len(states) > 3
    wholes = {check_what_is_left(memory, bells) for memory, bells in states}
    assert wholes == ({False, True} if control_bytes == 7 else {False})


def check_what_is_left(memory: bytes, bells: int) -> bool:
    """Reads what a killed writer has left; returns whether that was a whole frame."""
    one, other = pair()
    assert native is not None
    try:
        one.memory[:] = memory
        one.socket.send(b"b" * bells)
        one.socket.shutdown(socket.SHUT_RDWR)
        lease, taken = native.Lease.take(other.link), []
        for outcome in (1, -1):  # The frame if there is one, and then the end; both at once.
            found = lease.wait(1 << Kind.REPLY, 1, taken, None, -1, 20 + time.monotonic(), -1)
            assert found == outcome or not taken
        lease.release()
        assert found == -1
        assert all(frame.control == b"c" * 7 for frame in taken)
        return len(taken) == 1
    finally:
        one.close()
        other.close()


def test_a_reader_killed_at_any_instruction_leaves_no_wait_without_end(
    sides: tuple[Side, Side],
) -> None:
    """The writer has the rest of a frame, for which the reader was about to make room."""
    one, other = sides
    one.link.arm()
    assert not one.arrives(1, b"x" * 90)
    seen = set()
    for _ in Stepped(other.read).steps():
        is_asked = struct.unpack_from("<I", one.memory, one.out + WRITER_WAITS)[0]
        has_room = struct.unpack_from("<Q", one.memory, one.out + READ)[0] > 0
        seen.add((has_room, bool(is_asked), one.bells))
        assert is_asked or has_room, "a reader that has not read must ring"
    assert (True, False, 1) in seen
    other.socket.shutdown(socket.SHUT_RDWR)
    assert one.is_woken
    assert one.link.claim()
    one.link.read(False)  # The bell.
    assert one.link.read(False) is None


def test_a_reader_killed_before_its_bell_ends_the_wait_for_room(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.link.arm()
    assert not one.arrives(1, b"x" * 100)
    other.socket.shutdown(socket.SHUT_RDWR)
    assert one.is_woken
    assert one.link.claim()
    assert one.link.read(False) is None


def test_a_writer_is_told_of_the_end_where_it_rings(sides: tuple[Side, Side]) -> None:
    one, other = sides
    other.link.arm()
    other.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError, match="pipe"):
        one.arrives(1)


# A hostile peer


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("field", [WRITTEN, READ, READER_SLEEPS, WRITER_WAITS])
@pytest.mark.parametrize("direction", ["out", "into"])
def test_garbage_in_a_field_ends_the_link_or_changes_nothing(
    sides: tuple[Side, Side], direction: str, field: int, value: int
) -> None:
    one, other = sides
    assert one.arrives(1)
    assert other.read() == [1]
    one.set(getattr(one, direction) + field, value)
    one.link.arm()
    for side in sides:
        for number in range(4):
            try:
                side.link.write([frame(number, b"x" * 20)])
            except OSError:
                break
    for side in sides:
        try:
            for _ in range(4):
                side.read()
        except OSError:
            pass


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(min_size=2 * HEAD_BYTES, max_size=2 * HEAD_BYTES), st.integers(0, 1 << 64 - 1))
def test_garbage_in_all_fields_ends_the_link_or_changes_nothing(heads: bytes, near: int) -> None:
    one, other = pair()
    try:
        one.memory[: len(heads)] = heads
        one.set(one.into + WRITTEN, near % 100)
        for _ in range(3):
            for side in (one, other):
                try:
                    side.link.write([frame(1, b"x" * 20)])
                    side.read()
                except OSError:
                    pass
    finally:
        one.close()
        other.close()


# The memory


@pytest.mark.parametrize("error", [PermissionError, NotImplementedError])
def test_no_ring_is_offered_where_the_system_refuses_it(error: type[Exception]) -> None:
    refusal = OSError(38, "not implemented") if error is NotImplementedError else error(1, "no")
    with (
        mock.patch.object(os, "memfd_create", side_effect=refusal),
        ring.offer(is_wanted=True) as (made, descriptors),
    ):
        assert (made, descriptors) == (None, ())


def test_what_is_no_ring_is_not_taken() -> None:
    assert ring.take([]) is None
    with tempfile.TemporaryFile() as file:
        file.truncate(ring.MEMORY_BYTES)
        assert ring.take([file.fileno()]) is None
    for seals, size_bytes in ((0, ring.MEMORY_BYTES), (7, 4096)):
        descriptor = os.memfd_create("test", 3)
        try:
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, 1033, seals)
            assert ring.take([descriptor]) is None
        finally:
            os.close(descriptor)
