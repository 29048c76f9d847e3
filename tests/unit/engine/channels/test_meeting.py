"""How two sides find out which channels lead from one to the other."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.engine.channels.home import SomePeer, make_home
from tests.unit.engine.channels.processes import dead_pid
from tests.unit.engine.worker.group import KEY, group_of
from torchweft import knobs
from torchweft.engine.channels import rdma
from torchweft.engine.channels.channel import Meeting
from torchweft.engine.channels.channels import Channels, close_all
from torchweft.engine.channels.pull import NONCE_BYTES, Pull
from torchweft.engine.channels.rdma import Rdma
from torchweft.engine.channels.shm import SharedMemory
from torchweft.engine.io.handshake import Greeting, Handshake, NotProven
from torchweft.engine.io.link import Link
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import connecting
from torchweft.engine.worker.connecting import send_verdict
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ProtocolError
from torchweft.probe import read_facts
from torchweft.secret import Secret

MIB = 1 << 20

_nonce = ctypes.create_string_buffer(b"a nonce of a peer"[:NONCE_BYTES], NONCE_BYTES)
_ADDRESS = ctypes.addressof(_nonce)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def ours() -> Iterator[Channels]:
    with knobs.SHM_LIMIT_BYTES.override(8 * MIB):
        made = Channels(make_home())
    yield made
    made.close(0.0)


@pytest.fixture
def peer() -> SomePeer:
    return SomePeer()


# Descriptions


@pytest.mark.parametrize(
    "change",
    [
        {"cma": 5},
        {"cma": {"address": "1", "nonce": ""}},
        {"cma": {"address": -1, "nonce": ""}},
        {"cma": {"address": 1 << 64, "nonce": ""}},
        {"cma": {"address": 1, "nonce": 5}},
        {"shm": {"nonce": None}},
        {"rdma": {"obstacle": 1}},
        {"cuda_ipc": {"obstacle": []}},
        {"facts": {}},
        {"facts": None},
    ],
)
def test_malformed_descriptions_are_refused(
    ours: Channels,
    peer: SomePeer,
    pair: tuple[socket.socket, socket.socket],
    change: dict[str, object],
) -> None:
    with pytest.raises(ProtocolError):
        ours.meet(peer, pair[0], ours.describe() | change, [])


# Pulling


def meeting(told: dict[str, object] | None = None, **there: Any) -> Meeting:
    facts = read_facts()
    told = {"address": _ADDRESS, "nonce": _nonce.raw.hex()} if told is None else told
    return Meeting(facts, dataclasses.replace(facts, **there), told)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"boot_id": "another", "hostname": "node7"}, "another host (node7)"),
        ({"boot_id": ""}, "another host"),
        ({"pid_namespace": 1}, "another process namespace"),
        ({"uid": 12345}, "as user 12345"),
    ],
)
def test_facts_that_rule_it_out_are_named(
    peer: SomePeer, facts: dict[str, object], reason: str
) -> None:
    assert reason in Pull(make_home()).accept(peer, meeting(**facts))


def test_the_proof_decides(peer: SomePeer) -> None:
    told = {"address": _ADDRESS, "nonce": _nonce.raw.hex()}
    pull = Pull(make_home())
    for each in (
        meeting(told | {"nonce": "00" * 16}),
        meeting(told | {"nonce": "zz"}),
        meeting(told | {"address": 0}),
        meeting(pid=dead_pid()),
    ):
        assert pull.accept(peer, each)


# RDMA


def test_rdma_is_for_other_hosts_unless_it_is_forced(
    peer: SomePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = meeting({"obstacle": ""}, boot_id="another")
    monkeypatch.setattr(rdma, "own_obstacle", lambda: "no device")
    assert Rdma(make_home()).accept(peer, elsewhere) == "no device"
    monkeypatch.setattr(rdma, "own_obstacle", lambda: "")
    channel = Rdma(make_home())
    assert not channel.accept(peer, elsewhere)
    there = elsewhere._replace(told={"obstacle": "no device"})
    assert channel.accept(peer, there) == "of the peer: no device"
    assert channel.accept(peer, meeting({"obstacle": ""})) == "the peer is on this host"
    with knobs.RDMA.override("1"):
        assert not channel.accept(peer, meeting({"obstacle": ""}))


# Shared memory


def hand_over(channels: Channels, pair: tuple[socket.socket, socket.socket]) -> list[int]:
    descriptors: list[int] = []
    dialler, acceptor = greeted(pair)
    with channels.handed_over(pair[0]) as descriptor:
        acceptor.send(Kind.WELCOME, Greeting(1), [] if descriptor is None else [descriptor])
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
    ours: Channels, peer: SomePeer, pair: tuple[socket.socket, socket.socket]
) -> None:
    pool = ours.of(SharedMemory).pool
    assert pool is not None
    descriptors = hand_over(ours, pair)
    assert len(descriptors) == 1
    assert not os.get_inheritable(descriptors[0])
    ours.meet(peer, pair[0], ours.describe(), descriptors)
    assert descriptors == []
    assert peer.ways.verdict()["shm"] == ""
    assert ours.of(SharedMemory)._of(peer)._area.nonce == pool.area.nonce


@pytest.mark.parametrize("nonce", ["00" * 16, "", "no digits"])
def test_memory_with_other_contents_is_not_mapped(
    ours: Channels, peer: SomePeer, pair: tuple[socket.socket, socket.socket], nonce: str
) -> None:
    told = ours.describe() | {"shm": {"nonce": nonce}}
    ours.meet(peer, pair[0], told, hand_over(ours, pair))
    assert "cannot be mapped" in peer.ways.verdict()["shm"]


def test_a_malformed_description_closes_the_descriptor(
    ours: Channels, peer: SomePeer, pair: tuple[socket.socket, socket.socket]
) -> None:
    descriptors = hand_over(ours, pair)
    with pytest.raises(ProtocolError):
        ours.meet(peer, pair[0], None, descriptors)
    assert descriptors == []


def test_a_descriptor_that_comes_with_a_refused_greeting_is_the_caller_s(
    ours: Channels, pair: tuple[socket.socket, socket.socket]
) -> None:
    descriptors: list[int] = []
    dialler, acceptor = greeted(pair, dialler_key=Secret(b"the key of another run"))
    with ours.handed_over(pair[0]) as descriptor:
        acceptor.send(Kind.WELCOME, Greeting(1), [] if descriptor is None else [descriptor])
    with pytest.raises(NotProven, match="another run"):
        dialler.receive(Kind.WELCOME, descriptors)
    assert len(descriptors) == 1
    close_all(descriptors)


@pytest.mark.parametrize("dialler", [0, 1])
def test_both_sides_of_a_connection_borrow(dialler: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_late(peer: Peer, link: Link) -> None:
        time.sleep(0.02)  # Another thread would send its message meanwhile, if it could.
        send_verdict(peer, link)

    monkeypatch.setattr(connecting, "send_verdict", send_late)
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
            assert one.peer(other).ways.obstacles()["shm"] == ""


def test_the_memory_of_a_lost_peer_is_kept_until_its_messages_are_read() -> None:
    with knobs.SHM_LIMIT_BYTES.override(8 * MIB), group_of(2) as members:
        for member in members:
            member.start()
        first, second = members
        first.agent.connect(first.peer(second))
        shared, peer = first.agent.channels.of(SharedMemory), first.peer(second)
        first.agent.channels.lost(peer)
        shared.tick(0.0)
        assert shared._of(peer)
        shared.tick(0.0)
        with pytest.raises(ProtocolError, match="not mapped"):
            shared._of(peer)
