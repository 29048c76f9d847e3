from __future__ import annotations

import contextlib
import random
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from tests.certificates import Authority
from tests.thorough import examples
from tests.unit.engine.io.reading import received
from tests.unit.engine.io.secure.meeting import LIMIT_S, secure_pair, tcp_pair
from torchweft.engine.io.link import Link, LinkClosed
from torchweft.engine.io.secure import SecureConnection, TlsOptions, secure_server
from torchweft.engine.io.secure.connection import CUT_OFF
from torchweft.engine.wire.frames import Buffer, Frame, FrameParser, encode_frame

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


class Recorder:
    """The client's end of a connection, whose records a test sends itself.

    Args:
        options: The TLS options of both sides.
    """

    def __init__(self, options: TlsOptions) -> None:
        self.plain, server = tcp_pair()
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = options.client_context().wrap_bio(self._arrived, self._leaving)
        with ThreadPoolExecutor(1) as pool:
            accepting = pool.submit(secure_server, server, options, LIMIT_S)
            while not accepting.done() or self.plain in select.select([self.plain], [], [], 0)[0]:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    pass
                self.plain.sendall(self._leaving.read())
                if select.select([self.plain], [], [], 0.05)[0]:
                    self._arrived.write(self.plain.recv(1 << 16))
            self.server = cast(SecureConnection, accepting.result(LIMIT_S))
        self.server.settimeout(LIMIT_S)

    def record(self, plaintext: bytes) -> bytes:
        """Returns a record with a text, which is not sent."""
        self._tls.write(plaintext)
        return self._leaving.read()


@pytest.fixture
def recorder(authority: Authority) -> Iterator[Recorder]:
    made = Recorder(authority.options())
    with made.plain, made.server:
        yield made


def wait_for(end: SecureConnection, event: int) -> None:
    poll = select.poll()
    poll.register(end, event)
    assert poll.poll(LIMIT_S * 1e3)


def fill(end: SecureConnection, data: Buffer) -> int:
    """Sends until the socket is full; returns the number of bytes reported as sent."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < len(data):
            sent += end.sendmsg((memoryview(data)[sent:],), (), DONTWAIT)
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
    """Writes as a link does: some buffers at a time, with a poll when the socket is full.

    What could not be sent comes first in the next call, perhaps with more behind it.
    """
    dice, rest = random.Random(seed), memoryview(data)
    given = 0
    while rest:
        parts: list[Buffer] = [rest[:given]]
        for _ in range(dice.randint(1, 5)):
            size = dice.choice([0, 1, 1, 2, 20, 1000, 16 << 10, 100_000, 300_000])
            parts.append(rest[given : given + size])
            given += len(parts[-1])
        if not given:
            continue
        try:
            sent = end.sendmsg(parts, (), DONTWAIT)
            rest, given = rest[sent:], given - sent
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
    # The writer waits for room and continues with the same bytes, of which OpenSSL has a record.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_in_bits, server, BIG_BYTES, 2)
        while sent < BIG_BYTES:
            wait_for(client, select.POLLOUT)
            sent += fill(client, data[sent:])
        assert reading.result(LIMIT_S) == data


# Reading


def test_a_part_of_a_record_is_not_pending_and_does_not_wait(recorder: Recorder) -> None:
    server, record = recorder.server, recorder.record(b"whole")
    recorder.plain.sendall(record[:-1])
    wait_for(server, select.POLLIN)
    with pytest.raises(BlockingIOError):
        server.recv(100, DONTWAIT)
    assert not server.pending
    recorder.plain.sendall(record[-1:])
    assert server.recv(100) == b"whole"


def test_a_receive_with_a_tick_waits_for_one(pair: Pair) -> None:
    client, _ = pair
    client.settimeout(None)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
    with pytest.raises(BlockingIOError):
        client.recv(1)


# Time limits


def test_one_byte_at_a_time_does_not_gain_time(recorder: Recorder) -> None:
    server, record = recorder.server, recorder.record(b"never complete")
    is_over = threading.Event()

    def drip() -> None:
        for byte in record[:-1]:
            recorder.plain.sendall(bytes([byte]))
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


def test_an_end_within_a_record_is_an_error(recorder: Recorder) -> None:
    recorder.plain.sendall(recorder.record(b"a record")[:-3])
    recorder.plain.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match=CUT_OFF):
        recorder.server.recv(100)


def test_a_changed_byte_is_an_error_after_what_came_before(recorder: Recorder) -> None:
    server, good, bad = recorder.server, recorder.record(b"good"), recorder.record(b"bad")
    recorder.plain.sendall(good + bad[:-1] + bytes([bad[-1] ^ 1]))
    assert read_exactly(server, 4) == b"good"
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="not what the other side encrypted"):
            server.recv(100)


def test_a_record_that_comes_twice_is_an_error(recorder: Recorder) -> None:
    record = recorder.record(b"pay 5 euros")
    recorder.plain.sendall(record + record)
    assert read_exactly(recorder.server, 11) == b"pay 5 euros"
    with pytest.raises(ConnectionResetError, match="not what the other side encrypted"):
        recorder.server.recv(100)


def test_data_that_comes_with_the_end_of_the_handshake_is_not_lost(recorder: Recorder) -> None:
    recorder.plain.sendall(recorder.record(b"first") + recorder.record(b"second"))
    assert read_exactly(recorder.server, 11) == b"firstsecond"


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
        client.sendall(b"one more thing")
    assert server.recv(1) == b""


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
