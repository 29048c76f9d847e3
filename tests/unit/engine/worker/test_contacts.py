from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.thorough import examples
from tests.unit.engine.worker.group import LIMIT_S, Member, group_of, wait_until
from tests.unit.engine.worker.sessions import HEAD, Pair, content, pair_of, send
from torchweft import knobs
from torchweft.engine.io.handshake import Greeting, Handshake
from torchweft.engine.io.session import ResumableLink
from torchweft.engine.protocol.connecting import Patience, Terms
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind

AT_ONCE_S = 5.0
"""Less than the default patience, and more than a slow moment of the machine."""
CUTS = examples(60)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        yield made


# Sessions that continue


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_cut_every_message_comes_once_and_in_order(pair: Pair, seed: int) -> None:
    choose, stop, counts = random.Random(seed), threading.Event(), [0, 0]
    descriptors = len(os.listdir("/proc/self/fd"))

    def write(side: int, writer: int) -> None:
        members = (pair.dialler, pair.acceptor)
        number = 0
        while not stop.is_set():
            size = (10, 3000, 400_000)[number % 40 // 19]
            send(members[side], members[1 - side], number, size, writer)
            number += 1
            if number % 20 == 0:
                time.sleep(0.001)
        with lock:
            counts[1 - side] += number

    lock = threading.Lock()
    threads = [
        threading.Thread(target=write, args=(side, writer)) for side in (0, 1) for writer in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for _ in range(CUTS):
        sides = choose.choice([(0,), (1,), (0, 1)])
        for side in sides:
            members = (pair.dialler, pair.acceptor)
            members[side].cut(members[1 - side])
        if choose.random() < 0.7:
            wait_until(lambda: pair.is_sound)
        time.sleep(choose.random() * 0.003)
    stop.set()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    wait_until(lambda: [inbox.count for inbox in pair.inboxes] == counts)
    assert [inbox.wrong for inbox in pair.inboxes] == [[], []]
    assert pair.lost() == []
    assert pair.links[0].resumption_count >= CUTS // 3
    wait_until(lambda: pair.is_sound and len(os.listdir("/proc/self/fd")) <= descriptors)
    assert sum("weft-" in thread.name for thread in threading.enumerate()) <= 20


def test_a_connection_that_breaks_as_soon_as_it_is_made_is_made_again() -> None:
    for _ in range(5):
        with group_of(2, over="tcp") as members:
            cutter = threading.Thread(target=cut_first, args=members)
            cutter.start()
            pair = Pair(members)
            cutter.join(LIMIT_S)
            pair.check()
            assert pair.lost() == []


def cut_first(member: Member, other: Member) -> None:
    wait_until(lambda: member.peer(other).link)
    member.cut(other)


def test_a_dialler_whose_first_welcome_was_lost_gets_in_with_the_same_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, lost_names = Handshake.receive, []

    def break_first(handshake: Handshake, kind: Kind, *arguments: Any) -> Greeting:
        if kind == Kind.WELCOME and not lost_names:
            wait_until(lambda: second.peer(first).link)
            lost_names.append(second.terms(first).name)
            handshake._connection.close()
            raise ConnectionResetError("the welcome was lost")
        return receive(handshake, kind, *arguments)

    monkeypatch.setattr(Handshake, "receive", break_first)
    with group_of(2, over="tcp") as members:
        first, second = members
        pair = Pair(members)
        assert [terms.name for terms in pair.terms] == lost_names * 2
        # The acceptor also sees the end of the first connection, and may request another attempt
        # while the second is under way.
        assert pair.terms[0].attempt >= 2
        pair.check()
        assert len(second.agent.links.all()) == 1
        # Counters that differ between the two sides must not matter later.
        first.cut(second)
        wait_until(lambda: pair.is_sound)
        pair.check(3)


def test_a_resumption_whose_welcome_was_lost_is_tried_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, lost = Handshake.receive, []

    def break_first(handshake: Handshake, kind: Kind, *arguments: Any) -> Greeting:
        greeting = receive(handshake, kind, *arguments)
        if kind == Kind.WELCOME and "position" in greeting.facts and not lost:
            lost.append(greeting)
            raise ConnectionResetError("the welcome was lost")
        return greeting

    pair.check()
    monkeypatch.setattr(Handshake, "receive", break_first)
    pair.acceptor.cut(pair.dialler)
    wait_until(lambda: lost and pair.is_sound)
    pair.check(3)
    one, other = pair.links
    assert pair.terms[0].attempt >= 3
    assert one.resumption_count < other.resumption_count
    # Both sides still agree on the current connection.
    count = one.resumption_count
    probe(pair, pair.terms[1])
    wait_until(lambda: one.resumption_count > count and pair.is_sound)
    pair.check(6)


def probe(pair: Pair, terms: Terms) -> None:
    """Makes the acceptor report that the connection of an attempt broke."""
    peer = pair.acceptor.peer(pair.dialler)
    pair.acceptor.agent._connector.probe(peer, terms, time.monotonic() + LIMIT_S)


def test_the_side_that_did_not_dial_has_the_other_one_resume(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the connection does not reach the dialler."""
    monkeypatch.setattr("torchweft.engine.io.session.shut", lambda connection: None)
    pair.links[1].break_off("the network dropped it")
    wait_until(lambda: pair.links[1].resumption_count == 1 and pair.is_sound)
    pair.check()


def test_silence_has_a_new_connection_tried_beside_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence_s, silent = ResumableLink.silence_s, threading.Event()

    def deafened(link: ResumableLink) -> float | None:
        is_deaf = silent.is_set() and not link.resumption_count
        return 0.3 if is_deaf else silence_s(link)

    monkeypatch.setattr(ResumableLink, "silence_s", deafened)
    with pair_of(Patience(0.4, LIMIT_S)) as pair:
        pair.check()
        silent.set()
        wait_until(lambda: pair.links[0].resumption_count and pair.is_sound)
        silent.clear()
        pair.check(3)
        assert pair.lost() == []


def freeze(member: Member, other: Member) -> Callable[[], None]:
    """Stops a member, but not its kernel, from reading and answering; returns the undo."""
    link, acceptor, thawed = member.session(other), member.agent._acceptor, threading.Event()
    wait_until(link.claim)
    greet = acceptor.greet

    def greet_later(connection: socket.socket) -> None:
        assert thawed.wait(LIMIT_S)
        greet(connection)

    acceptor.greet = greet_later  # type: ignore[method-assign]

    def thaw() -> None:
        thawed.set()
        link.unclaim()
        member.agent.reactor.resume_reading(link.read_fd)

    return thaw


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_worker_that_is_busy_and_does_not_read_is_not_lost(frozen: int) -> None:
    """Holds even when waiting data has filled the buffers of the worker's kernel."""
    with pair_of(Patience(0.4, LIMIT_S)) as pair:
        members = pair.dialler, pair.acceptor
        busy, other = members[frozen], members[1 - frozen]
        pair.check()
        thaw = freeze(busy, other)
        inbox = pair.inboxes[frozen]
        for number in range(3, 33):
            parts = HEAD.pack(0, number, 1_000_000)
            buffer = memoryview(content(number, 1_000_000))
            message = encode_frame(Kind.CALL, 0, 0, parts, [buffer])
            other.agent.sender.send(other.peer(busy), message, may_block=False)
        time.sleep(3.0)  # By now the kernel probes at intervals longer than the patience.
        assert pair.lost() == []
        thaw()
        wait_until(lambda: inbox.count == 33)
        assert inbox.wrong == []


def test_memory_of_a_slow_peer_is_bounded_and_who_waits_goes_on() -> None:
    with knobs.SESSION_LIMIT_BYTES.override(1 << 20), pair_of() as pair:
        thaw = freeze(pair.acceptor, pair.dialler)
        sent = []

        def write() -> None:
            for number in range(1, 200, 2):
                pair.dialler.agent.sender.send(
                    pair.dialler.peer(pair.acceptor),
                    encode_frame(Kind.CALL, 0, 0, HEAD.pack(number, 0, 100_000), [chunk]),
                )
                sent.append(number)

        chunk = memoryview(content(0, 100_000))
        writer = threading.Thread(target=write)
        writer.start()
        link = pair.links[0]
        wait_until(lambda: link.kept_bytes > 1 << 20)
        time.sleep(0.05)
        assert link.kept_bytes < (1 << 20) + 200_000
        assert len(sent) < 100
        thaw()
        writer.join(LIMIT_S)
        wait_until(lambda: pair.inboxes[1].count == 100)


# Sessions that end


def close_listener(member: Member) -> None:
    member.agent.reactor.forget(member.listener.fileno())
    member.listener.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_peer_that_listens_no_more_is_lost_at_once(pair: Pair, gone: int) -> None:
    members = pair.dialler, pair.acceptor
    missing, other = members[gone], members[1 - gone]
    close_listener(missing)
    peer = other.peer(missing)
    began_s = time.monotonic()
    missing.agent.links.forget(missing.peer(other))  # The missing side ignores the break.
    other.session(missing).break_off("reset")
    wait_until(lambda: peer.lost)
    assert time.monotonic() - began_s < AT_ONCE_S
    assert peer.lost is not None
    assert "refused" in peer.lost.cause


def test_a_peer_that_has_forgotten_the_session_is_lost_at_once_and_on_both_sides(
    pair: Pair,
) -> None:
    connecting = pair.acceptor.peer(pair.dialler).connecting
    connecting.session = pair.terms[1]._replace(name="another session")
    began_s = time.monotonic()
    pair.dialler.cut(pair.acceptor)
    wait_until(lambda: len(pair.lost()) == 2)
    assert time.monotonic() - began_s < AT_ONCE_S
    assert any("there is no such session" in cause for cause in pair.lost())
