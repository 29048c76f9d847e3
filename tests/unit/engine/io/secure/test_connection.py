from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certificates import Authority
from tests.thorough import examples
from tests.unit.engine.io.reading import received
from tests.unit.engine.io.secure.meeting import LIMIT_S, secure_pair
from torchweft.engine.io.link import Link, LinkClosed
from torchweft.engine.io.secure import SecureConnection
from torchweft.engine.io.secure.connection import _PIECE_BYTES, CUT_OFF, _pieces
from torchweft.engine.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.errors import NotSupported

DONTWAIT = socket.MSG_DONTWAIT
BIG_BYTES = 3 << 20

Pair = tuple[SecureConnection, SecureConnection]


@pytest.fixture
def pair(authority: Authority) -> Iterator[Pair]:
    with secure_pair(authority.options(), authority.options()) as ends:
        for end in ends:
            end.settimeout(LIMIT_S)
        yield ends


@pytest.fixture
def narrow(pair: Pair) -> Pair:
    """A pair whose sockets fill up soon."""
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return pair


def wait_for(end: SecureConnection, event: int) -> None:
    poll = select.poll()
    poll.register(end, event)
    assert poll.poll(LIMIT_S * 1e3)


def fill(end: SecureConnection, data: Buffer) -> int:
    """Sends until the socket is full; returns the number of bytes reported as sent."""
    sent = 0
    try:
        while True:
            sent += end.send(memoryview(data)[sent:], DONTWAIT)
    except BlockingIOError:
        return sent


def read_exactly(end: SecureConnection, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = end.recv(size - len(data))
        assert part
        data += part
    return bytes(data)


# Writing and reading without waiting, as the agent's threads do


def write_in_bits(end: SecureConnection, data: bytes, seed: int) -> None:
    """Writes as a link does: some buffers at a time, with a poll when the socket is full."""
    dice, rest = random.Random(seed), memoryview(data)
    while rest:
        parts: list[Buffer] = []
        taken = 0
        for _ in range(dice.randint(1, 5)):
            size = dice.choice([0, 1, 1, 2, 20, 1000, 16 << 10, 100_000, 300_000])
            parts.append(rest[taken : taken + size])
            taken += len(parts[-1])
        if not taken:
            continue
        try:
            rest = rest[end.sendmsg(parts, (), DONTWAIT) :]
        except BlockingIOError:
            wait_for(end, select.POLLOUT)


def read_in_bits(end: SecureConnection, size: int, seed: int) -> bytes:
    """Reads as the agent does: after an event, and while something is pending."""
    dice, data = random.Random(seed), bytearray()
    while len(data) < size:
        if not end.pending:
            wait_for(end, select.POLLIN)
        spaces = [memoryview(bytearray(dice.choice([1, 30, 5000, 70_000]))) for _ in range(3)]
        spaces = spaces[: dice.randint(1, 3)]
        try:
            if len(spaces) == 1:
                count = end.recv_into(spaces[0], 0, DONTWAIT)
            else:
                count = end.recvmsg_into(spaces, 0, DONTWAIT)[0]
        except BlockingIOError:
            continue
        assert count
        data += b"".join(spaces)[:count]
    return bytes(data)


@pytest.mark.parametrize("seed", range(examples(6)))
def test_streams_both_ways_at_once_arrive_as_they_were_sent(narrow: Pair, seed: int) -> None:
    dice = random.Random(seed)
    there, back = dice.randbytes(BIG_BYTES), dice.randbytes(BIG_BYTES // 3)
    client, server = narrow
    with ThreadPoolExecutor(4) as pool:
        writing = [
            pool.submit(write_in_bits, client, there, seed),
            pool.submit(write_in_bits, server, back, seed + 1),
        ]
        reading = [
            pool.submit(read_in_bits, server, len(there), seed + 2),
            pool.submit(read_in_bits, client, len(back), seed + 3),
        ]
        for future in writing:
            future.result(LIMIT_S)
        assert reading[0].result(LIMIT_S) == there
        assert reading[1].result(LIMIT_S) == back


def test_what_was_encrypted_but_not_sent_is_not_reported_as_sent(narrow: Pair) -> None:
    client, server = narrow
    data = random.Random(1).randbytes(BIG_BYTES)
    sent = fill(client, data)
    assert 0 < sent < BIG_BYTES
    # The writer waits for room and retries, which also sends the rest of the ciphertext.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_in_bits, server, sent + 1, 2)
        while sent < BIG_BYTES and not reading.done():
            wait_for(client, select.POLLOUT)
            try:
                sent += client.send(data[sent : sent + 1], DONTWAIT)
            except BlockingIOError:
                continue
        received = reading.result(LIMIT_S)
    assert received == data[: len(received)]


def test_a_writer_that_does_not_go_on_where_it_stopped_is_caught(narrow: Pair) -> None:
    client, server = narrow
    sent = fill(client, b"a" * BIG_BYTES)
    client.settimeout(LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_exactly, server, sent + 1)
        with pytest.raises(BrokenPipeError, match="did not go on where it had stopped"):
            client.send(b"b")
        assert set(reading.result(LIMIT_S)) == set(b"a")


def test_a_blocking_write_sends_all(narrow: Pair) -> None:
    client, server = narrow
    client.settimeout(None)
    data = random.Random(3).randbytes(BIG_BYTES)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_exactly, server, BIG_BYTES)
        assert client.sendmsg([data[:10], b"", data[10:]]) == BIG_BYTES
        assert reading.result(LIMIT_S) == data


@given(st.lists(st.integers(0, 3 * _PIECE_BYTES), max_size=8), st.integers(0, 255))
def test_pieces_are_all_bytes_in_order_and_neither_empty_nor_large(
    sizes: list[int], seed: int
) -> None:
    parts = [random.Random(seed + number).randbytes(size) for number, size in enumerate(sizes)]
    pieces = list(_pieces(parts))
    assert b"".join(pieces) == b"".join(parts)
    assert all(0 < len(piece) <= _PIECE_BYTES for piece in pieces)


def test_small_parts_go_together() -> None:
    assert list(_pieces([b"head", b"", b"body"])) == [b"headbody"]


def test_large_parts_are_not_copied() -> None:
    part = bytearray(_PIECE_BYTES + 1)
    assert all(piece.obj is part for piece in _pieces([part]) if isinstance(piece, memoryview))
    assert all(isinstance(piece, memoryview) for piece in _pieces([part]))


# Reading


def test_what_is_in_memory_already_is_pending(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"x" * 1000)
    wait_for(server, select.POLLIN)
    assert server.recv(1) == b"x"
    assert server.pending
    poll = select.poll()
    poll.register(server, select.POLLIN)
    assert not poll.poll(0)  # Pending plaintext causes no event.
    assert len(server.recv(1000)) == 999
    assert not server.pending


def test_nothing_pending_and_nothing_there_does_not_wait(pair: Pair) -> None:
    client, _ = pair
    assert not client.pending
    with pytest.raises(BlockingIOError):
        client.recv(1, DONTWAIT)
    client.settimeout(0)
    with pytest.raises(BlockingIOError):
        client.recv(1)


def test_a_part_of_a_record_is_not_pending_and_does_not_wait(pair: Pair) -> None:
    client, server = pair
    client._stream.encrypt(b"whole")
    record = client._stream.take()
    client._socket.sendall(record[:-1])
    wait_for(server, select.POLLIN)
    with pytest.raises(BlockingIOError):
        server.recv(100, DONTWAIT)
    assert not server.pending
    client._socket.sendall(record[-1:])
    assert server.recv(100) == b"whole"


def test_a_receive_with_a_tick_waits_for_one(pair: Pair) -> None:
    client, _ = pair
    client.settimeout(None)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
    with pytest.raises(BlockingIOError):
        client.recv(1)


def test_no_room_receives_nothing(pair: Pair) -> None:
    assert pair[0].recv_into(bytearray()) == 0
    assert pair[0].recv(0) == b""


# Time limits


def test_a_receive_ends_at_its_timeout(pair: Pair) -> None:
    pair[0].settimeout(0.02)
    with pytest.raises(TimeoutError):
        pair[0].recv(1)


def test_one_byte_at_a_time_does_not_gain_time(pair: Pair) -> None:
    client, server = pair
    is_over = threading.Event()
    client._stream.encrypt(b"never complete")
    record = client._stream.take()

    def drip() -> None:
        for byte in record[:-1]:
            client._socket.sendall(bytes([byte]))
            if is_over.wait(0.002):
                return
        is_over.wait(LIMIT_S)

    dripping = threading.Thread(target=drip)
    dripping.start()
    server.settimeout(0.03)
    with pytest.raises(TimeoutError):
        server.recv(1)
    is_over.set()
    dripping.join(LIMIT_S)


def test_sending_to_who_does_not_read_ends_at_its_timeout(narrow: Pair) -> None:
    narrow[0].settimeout(0.02)
    with pytest.raises(TimeoutError):
        narrow[0].sendall(bytes(BIG_BYTES))


# The end


def test_a_farewell_is_the_end_of_file(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"last words")
    client.close()
    assert server.recv(100) == b"last words"
    assert server.recv(100) == b""
    assert server.recv(100, DONTWAIT) == b""


def test_an_end_without_farewell_is_an_error_and_no_end_of_file(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"not the last words")
    client._socket.shutdown(socket.SHUT_WR)
    assert server.recv(100) == b"not the last words"
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match=CUT_OFF):
            server.recv(100)


def test_an_end_within_a_record_is_an_error(pair: Pair) -> None:
    client, server = pair
    client._stream.encrypt(b"a record")
    client._socket.sendall(client._stream.take()[:-3])
    client._socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match=CUT_OFF):
        server.recv(100)


def test_a_changed_byte_is_an_error_after_what_came_before(pair: Pair) -> None:
    client, server = pair
    client._stream.encrypt(b"good")
    good = client._stream.take()
    client._stream.encrypt(b"bad")
    bad = bytearray(client._stream.take())
    bad[-1] ^= 1
    client._socket.sendall(good + bad)
    assert read_exactly(server, 4) == b"good"
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="not what the other side encrypted"):
            server.recv(100)


def test_a_record_that_comes_twice_is_an_error(pair: Pair) -> None:
    client, server = pair
    client._stream.encrypt(b"pay 5 euros")
    record = client._stream.take()
    client._socket.sendall(record + record)
    assert read_exactly(server, 11) == b"pay 5 euros"
    with pytest.raises(ConnectionResetError, match="not what the other side encrypted"):
        server.recv(100)


def hang_up_during(
    end: SecureConnection, waiting: Callable[[], object], has_begun: Callable[[], bool]
) -> BaseException | None:
    """Ends a connection while another thread waits in it; returns that thread's exception."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(waiting)
        while not has_begun():
            pass
        end.shutdown(socket.SHUT_RDWR)
        return future.exception(LIMIT_S)


@pytest.mark.parametrize("timeout_s", [None, LIMIT_S])
def test_hanging_up_wakes_who_reads(pair: Pair, timeout_s: float | None) -> None:
    end = pair[0]
    end.settimeout(timeout_s)
    begun = threading.Event()

    def read() -> bytes:
        begun.set()
        return end.recv(1)

    assert isinstance(hang_up_during(end, read, begun.is_set), ConnectionError)


@pytest.mark.parametrize("timeout_s", [None, LIMIT_S])
def test_hanging_up_wakes_who_writes(narrow: Pair, timeout_s: float | None) -> None:
    end = narrow[0]
    end.settimeout(timeout_s)
    error = hang_up_during(end, lambda: end.sendall(bytes(BIG_BYTES)), end._writing.locked)
    assert isinstance(error, ConnectionError)


def test_nothing_can_be_sent_after_the_farewell(pair: Pair) -> None:
    client, server = pair
    client.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError):
        client.send(b"one more thing")
    assert server.recv(1) == b""


def test_closing_twice_is_harmless(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()
    assert pair[0].fileno() == -1


# Unsupported operations


def test_half_a_connection_cannot_be_ended(pair: Pair) -> None:
    with pytest.raises(NotSupported, match="SHUT_RDWR"):
        pair[0].shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    "use",
    [
        lambda end: end.recv(1, socket.MSG_PEEK),
        lambda end: end.recvmsg_into([bytearray(1)], 100),
        lambda end: end.send(b"x", socket.MSG_OOB),
        lambda end: end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"")]),
    ],
)
def test_what_only_a_socket_can_do_is_refused(
    pair: Pair, use: Callable[[SecureConnection], object]
) -> None:
    with pytest.raises(NotSupported, match="no flags but MSG_DONTWAIT"):
        use(pair[0])


def test_it_is_no_way_around_tls(pair: Pair) -> None:
    for name in ("sendto", "recvfrom", "recvmsg", "makefile", "sendfile", "detach"):
        assert not hasattr(pair[0], name)


def test_the_socket_shows(pair: Pair) -> None:
    client, server = pair
    assert client.family == socket.AF_INET
    assert client.getpeername() == server.getsockname()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with client.dup() as second:
        assert second.fileno() != client.fileno()


# Under a link


class End:
    """A link over a secure connection, and a thread that reads it."""

    def __init__(self, connection: SecureConnection) -> None:
        self.is_full = threading.Event()
        parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, 1 << 24, 1 << 26)
        self.link = Link(connection, parser, lambda link: self.is_full.set())  # type: ignore[arg-type]

    def read(self, count: int) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < count:
            frames += received(self.link, may_block=True)
        return frames

    def flush(self) -> None:
        """Flushes the link as the reactor does."""
        assert self.is_full.wait(LIMIT_S)
        while self.is_full.is_set():
            poll = select.poll()
            poll.register(self.link.write_fd, select.POLLOUT)
            assert poll.poll(LIMIT_S * 1e3)
            self.is_full.clear()
            self.link.flush()


def test_a_link_works_over_it(narrow: Pair) -> None:
    one, other = map(End, narrow)
    body = random.Random(4).randbytes(BIG_BYTES)
    messages: list[list[Buffer]] = [
        encode_frame(1, 0, number, b"control", [memoryview(body)]) for number in range(3)
    ]
    with ThreadPoolExecutor(2) as pool:
        for message in messages:
            one.link.send(message, may_block=False)  # The main thread leaves it to ``flush``.
        reading = pool.submit(other.read, 3)
        pool.submit(one.flush).result(LIMIT_S)
        frames = reading.result(LIMIT_S)
        assert [frame.id for frame in frames] == [0, 1, 2]
        assert all(bytes(frame.buffers[0]) == body for frame in frames)
    assert other.link.bytes_received == one.link.bytes_sent
    one.link.close()
    with pytest.raises(LinkClosed, match="end of file"):
        other.read(1)
    other.link.close()
