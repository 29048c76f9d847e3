from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tests.memory_counts import first_for, held_counts, pool_counts
from tests.thorough import examples
from tests.unit.engine.worker.group import FRONT, Member, Received, group_of, wait_until
from torchweft import knobs
from torchweft.engine.channels import stripes as striped
from torchweft.engine.channels.channel import Entry
from torchweft.engine.channels.device_copies import HostCopies, Part
from torchweft.engine.channels.memory import address_of
from torchweft.engine.channels.stripes import Outbox, SendingConnection, Stripes
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer
from torchweft.errors import NotInitialized, WorkerLost

LIMIT_S = 20.0
NEVER_BYTES = 1 << 60
SIZE = 300_000
"""Number of a tensor's elements, of four bytes each: several stripes."""


@contextlib.contextmanager
def striping(over: str = "unix") -> Iterator[list[Member]]:
    """Makes two members that share no memory."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(knobs.CMA_FROM_BYTES.override(NEVER_BYTES))
        stack.enter_context(knobs.SHM_FROM_BYTES.override(NEVER_BYTES))
        stack.enter_context(knobs.STRIPED_FROM_BYTES.override(200_000))
        stack.enter_context(knobs.STRIPE_BYTES.override(100_000))
        stack.enter_context(knobs.STRIPE_STALL_S.override(LIMIT_S))
        members = stack.enter_context(group_of(2, over=over))
        for member in members:
            member.start()
        yield members


@pytest.fixture
def pair() -> Iterator[list[Member]]:
    with striping() as members:
        yield members


def data_of(member: Member) -> Stripes:
    return member.agent.channels.of(Stripes)


def send(sender: Member, to: Member, *tensors: torch.Tensor) -> None:
    peer = sender.peer(to)
    if peer.link is None:
        sender.agent.connect(peer)
        wait_until(lambda: first_for(peer.ways, NEVER_BYTES // 2) == "striped")
    sender.agent.sender.send(
        peer, sender.tensor_messages.encode(peer, Kind.CALL, 0, 7, FRONT, tensors)
    )


def is_free(sender: Member, to: Member) -> bool:
    """Whether the sender keeps no tensor for another member."""
    return not held_counts(sender.peer(to).held).message_count


def hold_back(monkeypatch: pytest.MonkeyPatch, stripes: int) -> threading.Event:
    """Lets connections take ``stripes`` stripes, and more only once the event is set."""
    may_go_on, lock = threading.Event(), threading.Lock()
    take = Outbox.take
    left = stripes

    def held(outbox: Outbox, connection: SendingConnection) -> list[Buffer]:
        nonlocal left
        with lock:
            if outbox._transfers and left <= 0 and not may_go_on.is_set():
                return []
            parts = take(outbox, connection)
            left -= bool(parts)
            return parts

    monkeypatch.setattr(Outbox, "take", held)
    return may_go_on


def test_tensors_arrive_over_connections_made_when_first_needed(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    send(first, second, torch.ones(3))
    received.next()
    data = data_of(first)._of(first.peer(second))
    assert data.sending is None
    sent = [torch.randn(SIZE), torch.arange(5), torch.randn(2 * SIZE)]
    for _ in range(3):
        send(first, second, *sent)
        arrived = received.next().tensors()[0]
        assert all(torch.equal(*both) for both in zip(sent, arrived, strict=True))
    sending = data.sending
    assert sending is not None
    assert len(sending.connections) == knobs.STRIPE_CONNECTIONS.default
    wait_until(lambda: sending.is_empty)


def cut_data(sender: Member, to: Member) -> None:
    """Ends one of the data connections to another member."""
    sending = data_of(sender)._of(sender.peer(to)).sending
    assert sending is not None
    with contextlib.suppress(OSError):
        sending.connections[0]._socket.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("stripes", [0, 1, 2, 7])
def test_a_data_connection_that_breaks_makes_no_loss(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch, stripes: int
) -> None:
    """It breaks between stripes or within one; the missing data follows among the messages."""
    first, second = pair
    received = Received(second)
    may_go_on = hold_back(monkeypatch, stripes)
    sent = [torch.randn(SIZE), torch.randn(2 * SIZE)]
    send(first, second, *sent)
    assert received.begun.wait(LIMIT_S)
    data = data_of(second)._of(second.peer(first))
    wait_until(lambda: len(data.arrivals.under_way) and len(data.receiving) == 2)
    cut_data(first, second)
    arrived = received.next().tensors()[0]
    assert all(torch.equal(*both) for both in zip(sent, arrived, strict=True))
    may_go_on.set()
    # Later tensors take new connections.
    wait_until(lambda: not data.receiving)
    send(first, second, *sent)
    arrived = received.next().tensors()[0]
    assert all(torch.equal(*both) for both in zip(sent, arrived, strict=True))
    assert data_of(first)._of(first.peer(second)).set_count == 2
    assert first.peer(second).lost is second.peer(first).lost is None
    assert len(data.receiving) == 2
    assert len(data.arrivals.under_way) == 0


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_tensors_come_whatever_breaks_and_nothing_is_left(over: str) -> None:
    """Data connections break at any moment, and over TCP the session does too."""
    with striping(over=over) as (first, second):
        choose = random.Random(7)
        received = Received(second)
        send(first, second, torch.randn(SIZE))
        received.next()
        descriptors = len(os.listdir("/proc/self/fd"))
        for number in range(examples(40)):
            sent = [torch.full((SIZE,), float(number)), torch.randn(3)]
            send(first, second, *sent)
            time.sleep(choose.random() * 0.002)
            if data_of(first)._of(first.peer(second)).sending is not None:
                with contextlib.suppress(AssertionError):  # Broken meanwhile.
                    cut_data(first, second)
            if over == "tcp" and number % 5 == 0:
                first.cut(second)
            arrived = received.next().tensors()[0]
            assert all(torch.equal(*both) for both in zip(sent, arrived, strict=True))
            del sent, arrived
        received.message = None
        assert first.peer(second).lost is second.peer(first).lost is None
        receiving = data_of(second)._of(second.peer(first))
        wait_until(lambda: is_free(first, second), "that all had been let go of")
        wait_until(lambda: pool_counts(second.agent.pool).leased_count == 0)
        assert len(receiving.arrivals.under_way) == 0
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


class SlowCopy(HostCopies):
    """Fills buffers in steps, as a device does that copies to the host.

    Args:
        sources: What the buffers are to hold.
        step: Called before each step, with the number of bytes that may be sent.
    """

    def __init__(self, sources: list[torch.Tensor], step: Callable[[int], object]) -> None:
        self._sources = [source.view(torch.uint8) for source in sources]
        self._targets = [torch.full_like(source, 0xEE) for source in self._sources]
        self._step = step
        self._is_whole = threading.Event()
        super().__init__([target.numpy().data for target in self._targets], ())

    def wait(self) -> list[memoryview]:
        assert self._is_whole.wait(LIMIT_S)
        return self.memories

    def parts(self, buffers: Sequence[memoryview]) -> Iterator[Part]:
        assert list(map(address_of, buffers)) == list(map(address_of, self.memories))
        done_bytes = 0
        for position, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
            for start in range(0, source.numel(), 250_000):
                end = min(start + 250_000, source.numel())
                self._step(done_bytes)
                done_bytes += end - start
                target[start:end].copy_(source[start:end])
                yield Part(position, start, end)
        self._is_whole.set()


def send_slowly(sender: Member, to: Member, copy: SlowCopy) -> list[torch.Tensor]:
    """Sends while the buffers are filled; returns the tensors that the receiver has."""
    peer, stripes = sender.peer(to), data_of(sender)
    token = next(peer.held.tokens)
    buffers = [torch.frombuffer(each, dtype=torch.uint8) for each in copy.memories]
    handles = [each for each in stripes.put(peer, token, buffers) if each is not None]
    peer.held.hold(token, [(stripes, handle) for handle in handles])
    try:
        stripes.begin(peer, token, handles, may_wait=False, copies=copy)
        entries = [Entry(Stripes.number, each.size_bytes, each.content) for each in handles]
        memories = to.tensor_messages._get(to.peer(sender), data_of(to), token, entries)
    finally:
        peer.held.release(token)
    return [torch.frombuffer(memory, dtype=torch.float32) for memory in memories]


def test_large_tensors_are_sent_while_a_device_still_copies_them(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    send(first, second, torch.ones(3))
    received.next()
    arrivals = data_of(second)._of(second.peer(first)).arrivals

    def step(done_bytes: int) -> None:
        # The parts before this one arrive while this one is copied.
        wait_until(lambda: arrivals.bytes_received >= done_bytes)

    sent = [torch.randn(SIZE), torch.randn(2 * SIZE)]
    found = send_slowly(first, second, SlowCopy(sent, step))
    assert all(torch.equal(*both) for both in zip(sent, found, strict=True))
    wait_until(lambda: is_free(first, second))


@pytest.mark.parametrize("when", [0, 750_000])
def test_connections_that_break_while_a_device_copies_make_no_loss(
    pair: list[Member], when: int
) -> None:
    """The receiver asks for the tensors only when all of their bytes are on the host."""
    first, second = pair
    received = Received(second)
    send(first, second, torch.randn(SIZE))
    received.next()
    data = data_of(first)._of(first.peer(second))

    def step(done_bytes: int) -> None:
        if done_bytes == when:
            cut_data(first, second)
            wait_until(lambda: data.sending is None)

    sent = [torch.randn(SIZE), torch.randn(2 * SIZE)]
    found = send_slowly(first, second, SlowCopy(sent, step))
    assert all(torch.equal(*both) for both in zip(sent, found, strict=True))
    wait_until(lambda: is_free(first, second))
    assert len(data_of(second)._of(second.peer(first)).arrivals.under_way) == 0


def test_a_device_copy_that_fails_leaves_nothing_kept(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    send(first, second, torch.randn(SIZE))
    received.next()

    def step(done_bytes: int) -> None:
        if done_bytes:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        send_slowly(first, second, SlowCopy([torch.randn(SIZE)], step))
    wait_until(lambda: is_free(first, second))


def test_a_connection_of_a_set_that_has_broken_comes_too_late(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    send(first, second, torch.ones(3))
    received.next()
    peer = second.peer(first)
    data_of(second)._end_receiving(peer, 4)
    ours, theirs = socket.socketpair()
    with theirs:
        assert data_of(second).take(peer, ours, 4)
        assert theirs.recv(1) == b""
    assert data_of(second)._of(peer).receiving == []


def test_what_does_not_come_for_long_is_asked_for_again(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sender may be busy, which does not make it lost."""
    first, second = pair
    data_of(second)._stall_s = 0.2
    received = Received(second)
    hold_back(monkeypatch, 1)
    sent = torch.randn(SIZE)
    send(first, second, sent)
    assert torch.equal(received.next().tensors()[0][0], sent)
    assert "nothing came for" in caplog.text
    assert second.peer(first).lost is None
    wait_until(lambda: is_free(first, second))
    received.message = None
    wait_until(lambda: pool_counts(second.agent.pool).leased_count == 0)


def test_a_close_ends_the_wait(pair: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    received = Received(second)
    hold_back(monkeypatch, 1)
    send(first, second, torch.randn(SIZE))
    assert received.begun.wait(LIMIT_S)
    data_of(second).close(0.01)
    # The sender notices as well, and may be the first to hang up.
    assert isinstance(received.failure(), (NotInitialized, WorkerLost))
    data_of(first).close(0.01)
    assert not [thread for thread in threading.enumerate() if "-data-" in thread.name]


class OneFirst:
    """Two data connections, of which one is read to its end before the other is read at all."""

    def __init__(self, pair: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = pair
        self._data, self._peer = data_of(second), second.peer(first)
        self._seen: list[striped.ReceivingConnection] = []
        read = striped.ReceivingConnection.read

        def read_one_first(connection: striped.ReceivingConnection) -> int:
            if connection not in self._seen:
                self._seen.append(connection)
            if connection is not self._seen[0] and not self._seen[0]._is_closed:
                time.sleep(0.001)
                return striped.READABLE
            return read(connection)

        monkeypatch.setattr(striped.ReceivingConnection, "read", read_one_first)

    def bring(self, *sent: bytes) -> None:
        """Sends over one connection each, and closes all when all are known to the reader."""
        with contextlib.ExitStack() as stack:
            for each in sent:
                mine, theirs = socket.socketpair()
                stack.enter_context(mine)
                mine.sendall(each)
                self._data.take(self._peer, theirs, 1)
                wait_until(lambda: len(self._seen) > 0)
            wait_until(lambda: len(self._seen) == len(sent))


def stripe(position: int, total_bytes: int = 500) -> bytes:
    return striped.Stripe(7, position, 0, 500, total_bytes).encode() + bytes(500)


def test_the_end_of_one_connection_loses_no_data_of_the_others(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    OneFirst(pair, monkeypatch).bring(stripe(0), stripe(1))
    first, second = pair
    arrivals = data_of(second)._of(second.peer(first)).arrivals
    for position in range(2):
        assert bytes(arrivals.wait(striped.TransferKey(1, 7, position), 500, LIMIT_S)) == bytes(500)
    assert second.peer(first).lost is None


def test_the_end_of_one_connection_hides_no_malformed_data_of_the_others(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    OneFirst(pair, monkeypatch).bring(stripe(0), stripe(1, total_bytes=100))
    first, second = pair
    wait_until(lambda: second.peer(first).lost is not None)
    assert "malformed data" in str(second.peer(first).lost)


def test_where_no_connection_can_be_made_tensors_follow_the_message(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    received = Received(second)
    send(first, second, torch.ones(3))
    received.next()

    def refuse(peer: Peer, count: int, number: int) -> list[socket.socket]:
        raise ConnectionRefusedError("nobody takes it")

    monkeypatch.setattr(first.agent._connector, "dial_data", refuse)
    for _ in range(2):
        sent = torch.randn(SIZE)
        send(first, second, sent)
        assert torch.equal(received.next().tensors()[0][0], sent)
    assert caplog.text.count("nobody takes it") == 1
    assert first_for(first.peer(second).ways, NEVER_BYTES // 2) == "stream"


def go_on(sender: Member, to: Member, may_go_on: threading.Event) -> None:
    """Lets connections send that ``hold_back`` has made idle."""
    may_go_on.set()
    data = data_of(sender)._of(sender.peer(to))
    assert data.sending is not None
    for connection in data.sending.connections:
        data_of(sender)._pump.arm(connection.fd, connection.write())


def test_waits_beyond_the_spare_ones_count_as_running(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads is bounded however many tensors are awaited, and all arrive."""
    first, second = pair
    data_of(second)._spare_waits = threading.Semaphore(2)
    received = Received(second)
    may_go_on = hold_back(monkeypatch, 0)
    count = 12
    for _ in range(count):
        send(first, second, torch.randn(SIZE))
    prefix = f"weft-{second.agent.info.name}-"

    def serving() -> int:
        return sum(
            thread.name[len(prefix) :].isdigit()
            for thread in threading.enumerate()
            if thread.name.startswith(prefix)
        )

    wait_until(lambda: len(second.agent.reactor.tasks) > 0)
    assert serving() <= 2 + 2 + 2
    go_on(first, second, may_go_on)
    for _ in range(count):
        received.next()
