from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.unit.agent.group import Member, group_of
from weft import knobs
from weft.agent import data_connections
from weft.agent.data_connections import DataConnections
from weft.agent.parcels import Parcel
from weft.agent.peers import Peer
from weft.channel.table import STRIPED, ChannelKind
from weft.errors import NotInitialized, WorkerLost
from weft.transport import addresses
from weft.transport.handshake import Greeting, receive_greeting, send_greeting
from weft.transport.striped.outgoing import Outbox, SendingConnection
from weft.wire.frames import Buffer, Frame
from weft.wire.messages import Kind

LIMIT_S = 20.0
NEVER_BYTES = 1 << 60
SIZE = 300_000
"""Of a tensor's elements, four bytes each; several stripes."""


@pytest.fixture
def pair() -> Iterator[list[Member]]:
    """Two members that share no memory."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(knobs.CMA_FROM_BYTES.override(NEVER_BYTES))
        stack.enter_context(knobs.SHM_FROM_BYTES.override(NEVER_BYTES))
        stack.enter_context(knobs.STRIPED_FROM_BYTES.override(200_000))
        stack.enter_context(knobs.STRIPE_BYTES.override(100_000))
        stack.enter_context(knobs.STRIPE_STALL_S.override(0.2))
        members = stack.enter_context(group_of(2))
        for member in members:
            member.start()
        yield members


class Opened:
    """What came to one member, opened there as a task."""

    def __init__(self, member: Member, opens: bool = True) -> None:
        self._member = member
        self._opens = opens
        self._came = threading.Semaphore(0)
        self.begun = threading.Event()
        self.parcel: Parcel | None = None
        self.error: Exception | None = None
        member.agent.on(Kind.CALL, self._on_call, inline=False)

    def _on_call(self, peer: Peer, frame: Frame) -> None:
        self.begun.set()
        try:
            self.parcel = self._member.parcels.read(frame)
            if self._opens:
                self._member.parcels.fetch(peer, self.parcel)
            else:
                self._member.parcels.discard(peer, self.parcel)
        except Exception as error:
            self.error = error
        self._came.release()

    def next(self) -> Parcel:
        assert self._came.acquire(timeout=LIMIT_S)
        assert self.error is None, self.error
        assert self.parcel is not None
        return self.parcel

    def failure(self) -> Exception:
        assert self._came.acquire(timeout=LIMIT_S)
        assert self.error is not None
        return self.error


def data_of(member: Member) -> DataConnections:
    source = member.parcels.sources[STRIPED]
    assert isinstance(source, DataConnections)
    return source


def send(sender: Member, to: Member, *tensors: torch.Tensor) -> None:
    peer = sender.peer(to)
    if peer.link is None:
        sender.agent.connect(peer)
        wait_until(lambda: peer.channels.channel_for(NEVER_BYTES // 2) == STRIPED)
    sender.agent.send(peer, sender.parcels.seal(peer, Kind.CALL, 0, 7, b"head", b"", tensors))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def hold_back(monkeypatch: pytest.MonkeyPatch, stripes: int) -> threading.Event:
    """Lets connections take a few stripes, and more only when the event is set."""
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
    opened = Opened(second)
    send(first, second, torch.ones(3))
    opened.next()
    data = data_of(first)._of(first.peer(second))
    assert data.sending == []
    sent = [torch.randn(SIZE), torch.arange(5), torch.randn(2 * SIZE)]
    for _ in range(3):
        send(first, second, *sent)
        arrived = opened.next().tensors(detached=False)
        assert all(torch.equal(*both) for both in zip(sent, arrived, strict=True))
    assert len(data.sending) == knobs.STRIPE_CONNECTIONS.default
    wait_until(lambda: data.outbox.is_empty)


def test_traffic_counts_them_on_both_sides(pair: list[Member]) -> None:
    first, second = pair
    opened = Opened(second)
    send(first, second, torch.randn(SIZE))
    opened.next()
    assert first.agent.traffic().bytes_sent >= 4 * SIZE
    wait_until(lambda: second.agent.traffic().bytes_received >= 4 * SIZE)


def test_what_nobody_reads_is_dropped_when_it_is_here(pair: list[Member]) -> None:
    first, second = pair
    opened = Opened(second, opens=False)
    send(first, second, torch.randn(SIZE))
    opened.next()
    arrivals = data_of(second)._of(second.peer(first)).arrivals
    wait_until(lambda: arrivals.bytes_received == 4 * SIZE and arrivals.count == 0)
    assert second.agent.pool.statistics().leased_count == 0


def test_the_sender_lets_go_of_what_is_written(pair: list[Member]) -> None:
    first, second = pair
    opened = Opened(second)
    sent = torch.randn(SIZE)
    is_alive = weakref.ref(sent)
    send(first, second, sent)
    opened.next()
    del sent
    wait_until(lambda: gc.collect() >= 0 and is_alive() is None)


@pytest.mark.parametrize("stripes", [0, 2])
def test_data_connections_that_end_are_the_loss_of_the_peer(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch, stripes: int
) -> None:
    """Also where they end between two stripes, which alone is no fault."""
    first, second = pair
    data_of(second)._stall_s = LIMIT_S
    opened = Opened(second)
    hold_back(monkeypatch, stripes)
    send(first, second, torch.randn(SIZE))
    assert opened.begun.wait(LIMIT_S)
    data = data_of(second)._of(second.peer(first))
    wait_until(lambda: data.arrivals.is_incomplete and len(data.receiving) == 2)
    for sending in data_of(first)._of(first.peer(second)).sending:
        sending._socket.shutdown(socket.SHUT_RDWR)
    assert isinstance(opened.failure(), WorkerLost)
    assert second.peer(first).lost is not None
    wait_until(lambda: data.is_closed)


def test_silence_is_the_loss_of_the_peer(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    opened = Opened(second)
    hold_back(monkeypatch, 1)
    send(first, second, torch.randn(SIZE))
    assert isinstance(opened.failure(), WorkerLost)
    assert second.peer(first).lost is not None


def test_the_loss_of_the_peer_ends_the_wait(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    data_of(second)._stall_s = LIMIT_S
    opened = Opened(second)
    hold_back(monkeypatch, 1)
    send(first, second, torch.randn(SIZE))
    arrivals = data_of(second)._of(second.peer(first)).arrivals
    assert opened.begun.wait(LIMIT_S)
    wait_until(lambda: arrivals.bytes_received > 0)
    second.agent.lose(second.peer(first), "a test")
    assert isinstance(opened.failure(), WorkerLost)
    wait_until(lambda: second.agent.pool.statistics().leased_count == 0)


def test_a_close_ends_the_wait(pair: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    data_of(second)._stall_s = LIMIT_S
    monkeypatch.setattr(data_connections, "_DRAIN_LIMIT_S", 0.01)
    opened = Opened(second)
    hold_back(monkeypatch, 1)
    send(first, second, torch.randn(SIZE))
    assert opened.begun.wait(LIMIT_S)
    data_of(second).close()
    # The sender notices as well, and may be the first to hang up.
    assert isinstance(opened.failure(), (NotInitialized, WorkerLost))
    data_of(first).close()
    assert not [thread for thread in threading.enumerate() if "-data-" in thread.name]


def test_a_close_sends_what_is_waiting(pair: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    opened = Opened(second)
    sent = torch.randn(20 * SIZE)
    send(first, second, sent)
    data_of(first).close()
    assert torch.equal(opened.next().tensors(detached=False)[0], sent)


def test_where_no_connection_can_be_made_tensors_follow_the_message(
    pair: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    opened = Opened(second)
    send(first, second, torch.ones(3))
    opened.next()
    second.peer(first).accept_data = None
    for _ in range(2):
        sent = torch.randn(SIZE)
        send(first, second, sent)
        assert torch.equal(opened.next().tensors(detached=False)[0], sent)
    assert caplog.text.count("takes no data connections") == 1
    assert first.peer(second).channels.channel_for(NEVER_BYTES // 2) == ChannelKind.STREAM


@pytest.mark.parametrize("token", ["token", "another run"])
def test_a_data_connection_is_greeted_like_any_other(pair: list[Member], token: str) -> None:
    first, second = pair
    text = second.agent.peers[1].registration.addresses[0]
    with addresses.dial(addresses.parse(text), LIMIT_S) as connection:
        send_greeting(connection, Kind.HELLO, Greeting(0, token, facts={"purpose": "data"}))
        if token == "token":
            assert not receive_greeting(connection, Kind.WELCOME, token, LIMIT_S).refusal
            data = data_of(second)._of(second.peer(first))
            wait_until(lambda: len(data.receiving) == 1)
        else:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            assert second.peer(first).id not in data_of(second)._data
    if token == "token":
        wait_until(lambda: not data.receiving)
        assert second.peer(first).lost is None


def test_a_lost_peer_makes_no_data_connection(pair: list[Member]) -> None:
    first, second = pair
    second.peer(first).declare_lost("a test")
    text = second.agent.peers[1].registration.addresses[0]
    with addresses.dial(addresses.parse(text), LIMIT_S) as connection:
        send_greeting(connection, Kind.HELLO, Greeting(0, "token", facts={"purpose": "data"}))
        answer = receive_greeting(connection, Kind.WELCOME, "token", LIMIT_S)
        assert "lost worker" in answer.refusal


def test_waits_beyond_the_spare_ones_count_as_running(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors are waited for, the threads are bounded, and all of them come."""
    first, second = pair
    data_of(second)._spare_waits = threading.Semaphore(2)
    opened = Opened(second)
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
    may_go_on.set()
    data = data_of(first)._of(first.peer(second))
    for connection in data.sending:
        data_of(first)._pump.arm(connection.fd, connection.write())
    for _ in range(count):
        opened.next()
