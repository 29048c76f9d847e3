from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from tests.unit.engine.io.reading import not_main, reading, received  # noqa: F401
from tests.unit.engine.io.secure.meeting import tcp_pair
from tests.unit.engine.io.test_link import links_of
from torchweft.engine.io.link import LinkClosed
from torchweft.engine.io.session import ResumableLink, position_in
from torchweft.engine.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.engine.wire.messages import Kind, encode_ints
from torchweft.engine.wire.session import ALONE_BYTES, Outgoing
from torchweft.errors import ProtocolError

pytestmark = pytest.mark.usefixtures("not_main")

LIMIT_S = 20.0
LIMIT_BYTES = 1 << 20
BIG_BYTES = 16 << 20


class End:
    """A session's link, connected to a plain socket."""

    link: ResumableLink

    def __init__(self, twin: str) -> None:
        self.breaks: list[tuple[str, bool]] = []
        self.is_full = threading.Event()
        ours, self.other = tcp_pair()
        parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, 1 << 24, 1 << 26)
        options = parser, lambda link: self.is_full.set(), self._on_break, LIMIT_BYTES
        with links_of(twin):
            self.link = ResumableLink(ours, *options)

    def _on_break(self, link: ResumableLink, cause: str, *, is_answer: bool) -> None:
        self.breaks.append((cause, is_answer))

    def reconnect(self, peer_position: int) -> None:
        """Resumes the session over a new connection."""
        self.other.close()
        ours, self.other = tcp_pair()
        self.link.resume(ours, peer_position)
        self.link.flush()

    def arrived(self, size: int) -> bytes:
        """Returns the next ``size`` bytes that the link sent."""
        self.other.settimeout(LIMIT_S)
        data = b""
        while len(data) < size:
            part = self.other.recv(size - len(data))
            assert part, f"only {len(data)} bytes came, of {size}"
            data += part
        return data

    def receive(self, count: int) -> list[Frame]:
        """Reads the link until ``count`` frames have arrived."""
        frames: list[Frame] = []
        deadline_s = time.monotonic() + LIMIT_S
        with reading(self.link):
            while len(frames) < count:
                assert time.monotonic() < deadline_s
                frames += received(self.link, may_block=True)
        return frames

    def notice(self) -> None:
        """Reads until the link has noticed that its connection has ended."""
        deadline_s = time.monotonic() + LIMIT_S
        with reading(self.link):
            while not self.link.is_broken:
                assert time.monotonic() < deadline_s
                assert received(self.link, may_block=True) == []

    def close(self) -> None:
        self.link.close()
        self.other.close()


@pytest.fixture
def end(twin: str) -> Iterator[End]:
    with contextlib.closing(End(twin)) as made:
        yield made


def frame_parts(number: int, control: bytes = b"", *buffers: bytes) -> list[Buffer]:
    return encode_frame(1, 0, number, control, [memoryview(buffer) for buffer in buffers])


def as_bytes(*frames: list[Buffer]) -> bytes:
    return b"".join(bytes(part) for frame in frames for part in frame)


FRAMES = [
    frame_parts(1, b"small"),
    frame_parts(2, b"with tensors", b"t" * 70, b"", b"u" * 10_000),
    frame_parts(3),
    frame_parts(4, b"c" * 9000),
]
STREAM = as_bytes(*FRAMES)


@settings(max_examples=examples(30))
@given(positions=st.lists(st.integers(0, len(STREAM)), max_size=5))
def test_what_is_sent_arrives_whole_wherever_connections_break(
    twin: str, positions: list[int]
) -> None:
    with contextlib.closing(End(twin)) as end:
        for frame in FRAMES:
            end.link.send(frame, may_block=False)
        came = b""
        for position in sorted(positions):
            came += end.arrived(position - len(came))
            end.reconnect(position)
        assert came + end.arrived(len(STREAM) - len(came)) == STREAM


@settings(max_examples=examples(30))
@given(positions=st.lists(st.integers(0, len(STREAM)), max_size=5))
def test_what_is_received_is_received_once_wherever_connections_break(
    twin: str, positions: list[int]
) -> None:
    with contextlib.closing(End(twin)) as end:
        frames: list[Frame] = []
        for position in sorted(positions):
            end.other.sendall(STREAM[end.link.bytes_received : position])
            with reading(end.link):
                while end.link.bytes_received < position:
                    frames += received(end.link, may_block=True)
            assert end.link.stop() == position
            end.reconnect(0)
        end.other.sendall(STREAM[end.link.bytes_received :])
        frames += end.receive(len(FRAMES) - len(frames))
    assert [frame.id for frame in frames] == [1, 2, 3, 4]
    assert [bytes(buffer) for buffer in frames[1].buffers] == [b"t" * 70, b"", b"u" * 10_000]
    assert bytes(frames[3].control) == b"c" * 9000


def test_a_break_is_noticed_by_who_writes(end: End) -> None:
    end.other.close()
    deadline_s = time.monotonic() + LIMIT_S
    while not end.link.is_broken:
        assert time.monotonic() < deadline_s
        end.link.send(frame_parts(1), may_block=False)
    ((cause, is_answer),) = end.breaks
    assert "reset" in cause or "pipe" in cause
    assert is_answer


@pytest.mark.parametrize(
    ("error", "is_answer"), [(ConnectionResetError("reset"), True), (TimeoutError("late"), False)]
)
def test_whether_a_break_is_an_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, error: OSError, is_answer: bool
) -> None:
    class Failing:
        """Acts like a socket whose connection the kernel has given up."""

        def __getattr__(self, name: str) -> Callable[..., int]:
            def fail(*_: object) -> int:
                raise error

            return fail

    with contextlib.closing(End("plain")) as end:
        with monkeypatch.context() as patch:
            patch.setattr(end.link, "_socket", Failing())
            end.notice()
        assert end.breaks == [(str(error), is_answer)]


def test_many_threads_notice_one_break(end: End) -> None:
    start = threading.Barrier(4)

    def write() -> None:
        start.wait(LIMIT_S)
        while not end.link.is_broken:
            end.link.send(frame_parts(1, b"x" * 100), may_block=False)

    def cut() -> None:
        start.wait(LIMIT_S)
        end.other.close()

    threads = [threading.Thread(target=target) for target in (write, write, end.notice, cut)]
    # The reader does not wait at the barrier: it reads from the start.
    for thread in threads:
        thread.start()
    start.wait(LIMIT_S)
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert len(end.breaks) == 1


def test_breaking_off_tells_the_peer_and_this_side(end: End) -> None:
    end.link.break_off("it says so")
    assert end.breaks == [("it says so", True)]
    end.other.settimeout(LIMIT_S)
    assert end.other.recv(1) == b""
    end.link.break_off("again")
    assert len(end.breaks) == 1


def test_who_waits_to_read_goes_on_with_the_new_connection(end: End) -> None:
    end.other.close()
    end.notice()
    frames: list[Frame] = []
    reader = threading.Thread(target=lambda: frames.extend(end.receive(1)))
    reader.start()
    end.reconnect(0)
    end.other.sendall(as_bytes(FRAMES[0]))
    reader.join(LIMIT_S)
    assert [frame.id for frame in frames] == [1]


def test_who_blocks_in_a_write_goes_on_with_the_new_connection(end: End) -> None:
    frame = frame_parts(1, b"z" * BIG_BYTES)
    writer = threading.Thread(target=end.link.send, args=(frame,), kwargs={"may_block": True})
    writer.start()
    came = end.arrived(100_000)
    end.other.close()
    writer.join(LIMIT_S)
    assert not writer.is_alive(), "it waits for room in a connection that has ended"
    ours, end.other = tcp_pair()
    end.link.resume(ours, len(came))
    flusher = threading.Thread(target=flush_until_written, args=(end,))
    flusher.start()
    assert came + end.arrived(len(as_bytes(frame)) - len(came)) == as_bytes(frame)
    flusher.join(LIMIT_S)
    assert not flusher.is_alive()


def flush_until_written(end: End) -> None:
    """Writes and flushes the link as the reactor does."""
    end.link.flush()
    while end.is_full.wait(0.1):
        end.is_full.clear()
        end.link.flush()


def test_after_much_the_peer_is_told_at_once(end: End) -> None:
    data = as_bytes(frame_parts(1, b"x" * ALONE_BYTES))
    writer = threading.Thread(target=end.other.sendall, args=(data,))
    writer.start()
    end.receive(1)
    writer.join(LIMIT_S)
    header = end.arrived(16)
    assert header[0] == Kind.ACKNOWLEDGED


def test_nothing_is_let_go_of_while_the_session_is_resumed(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Race: an acknowledgement and a resumption at once would drop data that must be kept."""
    end.link.send([*FRAMES[0], *FRAMES[3]], may_block=False)
    end.link.stop()
    since, late = Outgoing.since, []

    def overtaken(outgoing: Outgoing, position: int) -> list[Buffer]:
        if late:
            return since(outgoing, position)
        thread = threading.Thread(target=end.link.acknowledged, args=(len(as_bytes(FRAMES[0])),))
        thread.start()
        thread.join(0.05)
        late.append(thread)
        assert end.link._outgoing.acknowledged == 0
        return since(outgoing, position)

    monkeypatch.setattr(Outgoing, "since", overtaken)
    end.reconnect(0)
    late[0].join(LIMIT_S)
    assert end.link._outgoing.acknowledged == len(as_bytes(FRAMES[0]))
    expected = as_bytes(FRAMES[0], FRAMES[3])
    assert end.arrived(len(expected)) == expected


def test_who_may_block_waits_while_much_is_not_acknowledged(end: End) -> None:
    frame = frame_parts(1, b"z" * (LIMIT_BYTES + 1))
    reader = threading.Thread(target=end.arrived, args=(len(as_bytes(frame)),))
    reader.start()
    end.link.send(frame, may_block=True)
    reader.join(LIMIT_S)
    done = threading.Event()

    def send_more() -> None:
        end.link.send(FRAMES[0], may_block=True)
        done.set()

    sender = threading.Thread(target=send_more)
    sender.start()
    assert not done.wait(0.05)
    end.link.send(FRAMES[2], may_block=False)  # A sender that must not block does not wait.
    end.link.acknowledged(len(as_bytes(frame)))
    assert done.wait(LIMIT_S)
    sender.join(LIMIT_S)
    expected = as_bytes(FRAMES[2], FRAMES[0])
    assert end.arrived(len(expected)) == expected


def test_the_end_of_the_session_ends_the_wait_for_room(end: End) -> None:
    end.link.stop()
    end.link.send(frame_parts(1, b"z" * (LIMIT_BYTES + 1)), may_block=False)
    sender = threading.Thread(target=end.link._wait_for_room)
    sender.start()
    end.link.hang_up()
    sender.join(0.9)
    assert not sender.is_alive()
    with pytest.raises(LinkClosed):
        end.link.send(FRAMES[0], may_block=True)


def test_the_peer_cannot_be_where_nothing_was_sent(end: End) -> None:
    end.link.send(FRAMES[0], may_block=False)
    ours, theirs = tcp_pair()
    with theirs:
        with pytest.raises(ProtocolError, match="cannot go on at byte 999999"):
            end.link.resume(ours, 999_999)
        assert ours.fileno() == -1
    with pytest.raises(ProtocolError, match="999999 bytes are acknowledged"):
        end.link.acknowledged(999_999)


def test_a_session_that_has_ended_is_not_resumed(end: End) -> None:
    end.link.hang_up()
    ours, theirs = tcp_pair()
    with theirs:
        with pytest.raises(LinkClosed, match="the session has ended"):
            end.link.resume(ours, 0)
        assert ours.fileno() == -1
    assert end.breaks == []


def test_descriptors_keep_their_numbers_and_are_those_of_the_connection(end: End) -> None:
    numbers = end.link.read_fd, end.link.write_fd
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        end.reconnect(0)
        assert (end.link.read_fd, end.link.write_fd) == numbers
        inodes = {os.fstat(fd).st_ino for fd in (*numbers, end.link._socket.fileno())}
        assert len(inodes) == 1
        assert not any(os.get_inheritable(fd) for fd in numbers)
    assert len(os.listdir("/proc/self/fd")) == count
    assert end.link.resumption_count == 50


def test_a_session_that_ends_just_then_needs_no_goodbye(
    end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = end.link.send

    def end_first(parts: list[Buffer], *, may_block: bool) -> None:
        end.link.hang_up()
        send(parts, may_block=may_block)

    monkeypatch.setattr(end.link, "send", end_first)
    end.link.say_goodbye()
    assert end.breaks == []


def test_a_drain_waits_until_the_peer_has_everything(end: End) -> None:
    end.link.send(FRAMES[1], may_block=False)
    end.link.say_goodbye()
    drainer = threading.Thread(target=end.link.drain, args=(LIMIT_S,))
    drainer.start()
    drainer.join(0.05)
    assert drainer.is_alive()
    end.link.acknowledged(len(as_bytes(FRAMES[1])))
    drainer.join(LIMIT_S)
    assert not drainer.is_alive(), "nobody acknowledges a goodbye, or an acknowledgement"


def test_a_forked_process_frees_its_descriptors_and_leaves_the_connection(end: End) -> None:
    keeper = end.link._socket.dup()  # The parent's copy.
    end.link.abandon()
    end.other.sendall(b"x")
    keeper.settimeout(LIMIT_S)
    assert keeper.recv(1) == b"x"
    keeper.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(end.link.write_fd)
    end.link.read_fd = -1  # Another file may have its number by now.


@pytest.mark.parametrize("control", [b"", encode_ints(1, 2), encode_ints(-1), b"xyz"])
def test_an_acknowledgement_without_a_position_makes_no_sense(control: bytes) -> None:
    with pytest.raises(ProtocolError):
        position_in(control)
