from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.agent.group import KEY, group_of
from torchweft import knobs
from torchweft.agent import connector
from torchweft.agent.connector import send_verdict
from torchweft.agent.peers import Peer
from torchweft.channel.choice import Channels, MemoryExchange, close_all, map_memory
from torchweft.channel.table import ChannelKind
from torchweft.secret import Secret
from torchweft.transport.handshake import Greeting, Handshake, NotProven
from torchweft.transport.link import Link
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import Kind

SHM = ChannelKind.SHM
MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def exchange() -> Iterator[MemoryExchange]:
    with knobs.SHM_LIMIT_BYTES.override(8 * MIB):
        made = MemoryExchange()
    yield made
    made.close()


def hand_over(exchange: MemoryExchange, pair: tuple[socket.socket, socket.socket]) -> list[int]:
    descriptors: list[int] = []
    dialler, acceptor = greeted(pair)
    with exchange.descriptor_for(pair[0]) as descriptor:
        acceptor.send(Kind.WELCOME, Greeting(1), descriptor)
    assert dialler.receive(Kind.WELCOME, descriptors).worker == 1
    return descriptors


def greeted(
    pair: tuple[socket.socket, socket.socket], dialler_key: Secret = KEY
) -> tuple[Handshake, Handshake]:
    """Returns the ends of a connection whose second socket has dialled the first."""
    deadline_s = time.monotonic() + 5.0
    acceptor = Handshake.accept(pair[0], KEY, deadline_s)
    dialler = Handshake.dial(pair[1], dialler_key, deadline_s)
    dialler.send(Kind.HELLO, Greeting(0))
    if dialler_key is KEY:
        acceptor.receive(Kind.HELLO)
    return dialler, acceptor


def test_a_descriptor_comes_with_a_greeting_and_is_mapped(
    exchange: MemoryExchange, pair: tuple[socket.socket, socket.socket]
) -> None:
    assert exchange.pool is not None
    channels = Channels("ps", 1)
    descriptors = hand_over(exchange, pair)
    assert len(descriptors) == 1
    assert not os.get_inheritable(descriptors[0])
    map_memory(channels, descriptors, exchange.nonce)
    assert descriptors == []
    assert channels.verdict() == {"shm": ""}
    assert channels.borrowed()._area.nonce == exchange.pool.area.nonce


@pytest.mark.parametrize("nonce", ["00" * 16, "", "no digits"])
def test_memory_with_other_contents_is_not_mapped(
    exchange: MemoryExchange, pair: tuple[socket.socket, socket.socket], nonce: str
) -> None:
    channels = Channels("ps", 1)
    map_memory(channels, hand_over(exchange, pair), nonce)
    assert "cannot be mapped" in channels.verdict()["shm"]


def test_without_memory_the_verdict_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    with knobs.SHM_LIMIT_BYTES.override(0):
        exchange = MemoryExchange()
    channels = Channels("ps", 1)
    map_memory(channels, hand_over(exchange, pair), exchange.nonce)
    assert "handed over no shared memory" in channels.verdict()["shm"]


def test_a_descriptor_that_comes_with_a_refused_greeting_is_the_caller_s(
    exchange: MemoryExchange, pair: tuple[socket.socket, socket.socket]
) -> None:
    descriptors: list[int] = []
    dialler, acceptor = greeted(pair, dialler_key=Secret(b"the key of another run"))
    with exchange.descriptor_for(pair[0]) as descriptor:
        acceptor.send(Kind.WELCOME, Greeting(1), descriptor)
    with pytest.raises(NotProven, match="another run"):
        dialler.receive(Kind.WELCOME, descriptors)
    assert len(descriptors) == 1
    close_all(descriptors)


def test_a_closed_exchange_hands_nothing_over(
    exchange: MemoryExchange, pair: tuple[socket.socket, socket.socket]
) -> None:
    exchange.close()
    assert hand_over(exchange, pair) == []


def test_tcp_carries_no_descriptor(exchange: MemoryExchange) -> None:
    with socket.socket(socket.AF_INET) as connection, exchange.descriptor_for(connection) as none:
        assert none is None


@pytest.mark.parametrize("dialler", [0, 1])
def test_both_sides_of_a_connection_borrow(dialler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_late(peer: Peer, link: Link) -> None:
        time.sleep(0.02)  # Another thread would send its message meanwhile, if it could.
        send_verdict(peer, link)

    monkeypatch.setattr(connector, "send_verdict", send_late)
    with knobs.SHM_LIMIT_BYTES.override(8 * MIB), group_of(2) as members:
        for member in members:
            member.start()
        here, there = members[dialler], members[1 - dialler]
        # The acceptor's verdict comes over the connection, before anything else that it sends.
        answered = threading.Event()
        here.agent.receiver.on(Kind.CALL, lambda peer, frame: answered.set(), inline=True)
        here.agent.connect(here.peer(there))
        there.agent.sender.send(there.peer(here), encode_frame(Kind.CALL, 0, 1, b""))
        assert answered.wait(5.0)
        for one, other in ((here, there), (there, here)):
            assert one.peer(other).channels.obstacles()[SHM] == ""
            assert one.peer(other).channels.lender is not None


def test_a_member_gives_idle_memory_back() -> None:
    with (
        knobs.SHM_LIMIT_BYTES.override(8 * MIB),
        knobs.POOL_IDLE_S.override(0.0),
        group_of(1) as [member],
    ):
        pool = member.agent.memory.pool
        assert pool is not None
        pool.share(MIB)
        member.agent.pool.lease(MIB)
        assert (pool.trim(100.0), member.agent.pool.trim(100.0)) == (0, 0)
        assert member.tensor_messages.tick(5.0) == 5.0
        assert pool.statistics().resident_bytes == 0
        assert member.agent.pool.statistics().idle_bytes == 0


def test_idle_memory_is_looked_for_now_and_then() -> None:
    with knobs.POOL_IDLE_S.override(8.0), group_of(1) as [member]:
        assert [member.tensor_messages.tick(now_s) for now_s in (1.0, 4.9, 5.0)] == [5.0, 5.0, 9.0]
