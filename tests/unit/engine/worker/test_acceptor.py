from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.unit.engine.worker.group import KEY, LIMIT_S, Member, group_of, wait_until
from torchweft import knobs
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Greeting, Handshake, frame_with, new_voucher
from torchweft.engine.io.link import shut
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.connecting import Acceptor
from torchweft.secret import Secret

STRANGERS = 4
AT_ONCE_S = 5.0
"""Less than the time that a connection may take."""


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    with (
        knobs.STRANGER_LIMIT.override(STRANGERS),
        knobs.CONNECT_TIMEOUT_S.override(LIMIT_S),
        group_of(2, over=request.param) as members,
    ):
        for member in members:
            member.start()
        yield members


def dial(member: Member) -> socket.socket:
    connection = addresses.dial(member.address, LIMIT_S)
    connection.settimeout(LIMIT_S)
    return connection


@contextlib.contextmanager
def vouchers_come_with_connections(first: Member, second: Member) -> Iterator[None]:
    """Has ``second`` accept no connection of ``first`` before its voucher has arrived.

    Otherwise a member's connection is a stranger's until then.
    """
    open_at = first.agent._connector._open_at

    def open_unseen(*args: Any) -> socket.socket:
        with second.agent._acceptor._lock:
            return open_at(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first.agent._connector, "_open_at", open_unseen)
        yield


def ended_ones(strangers: list[socket.socket]) -> list[socket.socket]:
    """Returns the connections that the other side has closed, without waiting."""
    ended = []
    for stranger in strangers:
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while has_said_more(stranger):
                pass
            ended.append(stranger)
    return ended


def has_said_more(stranger: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return bool(stranger.recv(1000))
    return False


def is_hung_up_on(stranger: socket.socket) -> bool:
    """Waits until the other side closes a connection; discards the data that it sent first."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(1000):
            pass
    return True


def test_strangers_that_go_slowly_occupy_no_more_threads_and_none_of_a_member(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    running: list[socket.socket] = []
    counts: list[int] = []
    may_end = threading.Event()
    greet = Acceptor._greet

    def greet_slowly(acceptor: Acceptor, connection: socket.socket) -> Any:
        if connection in acceptor._strangers._members:
            return greet(acceptor, connection)
        running.append(connection)
        counts.append(len(running))
        try:
            assert may_end.wait(LIMIT_S)
            return greet(acceptor, connection)
        finally:
            running.remove(connection)

    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(Acceptor, "_greet", greet_slowly)
        strangers = [stack.enter_context(dial(second)) for _ in range(5 * STRANGERS)]
        # Nobody serves those in the middle, and they are closed all the same.
        wait_until(lambda: set(strangers[STRANGERS:-STRANGERS]) <= set(ended_ones(strangers)))
        with vouchers_come_with_connections(first, second):
            first.agent.connect(first.peer(second))
        assert first.peer(second).lost is None
        may_end.set()
    wait_until(lambda: not running)
    assert max(counts) <= STRANGERS


def slow_member(member: Member, stack: contextlib.ExitStack) -> socket.socket:
    """Dials a member as a member does, up to the voucher."""
    connection = addresses.dial(member.address, LIMIT_S)
    stack.enter_context(connection)
    connection.sendall(frame_with(new_voucher(KEY, member.agent.info.id)))
    return connection


def greet_as(connection: socket.socket, worker: int) -> str:
    """Greets over a connection; returns the refusal, empty if it is welcome."""
    handshake = Handshake.dial(connection, KEY, time.monotonic() + LIMIT_S)
    handshake.send(Kind.HELLO, Greeting(worker, facts={"purpose": "introduction"}))
    return handshake.receive(Kind.WELCOME).refusal


def test_a_member_that_is_slow_keeps_its_place_in_a_flood(pair: list[Member]) -> None:
    first, second = pair
    with contextlib.ExitStack() as stack:
        member = slow_member(second, stack)
        wait_until(lambda: second.agent._acceptor._strangers._members)
        strangers = [stack.enter_context(dial(second)) for _ in range(5 * STRANGERS)]
        wait_until(lambda: len(ended_ones(strangers)) == 4 * STRANGERS)
        assert greet_as(member, first.agent.info.id) == ""
        wait_until(lambda: not second.agent._acceptor._strangers._members)


def test_a_member_whose_tls_handshake_is_slow_keeps_its_place_in_a_flood(tmp_path: Path) -> None:
    options = Authority(tmp_path).options()
    arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = options.client_context().wrap_bio(arrived, leaving, server_hostname=new_voucher(KEY, 1))
    with (
        knobs.STRANGER_LIMIT.override(STRANGERS),
        knobs.CONNECT_TIMEOUT_S.override(LIMIT_S),
        group_of(2, over="tcp", tls=options) as (_, second),
        contextlib.ExitStack() as stack,
    ):
        second.start()
        member = stack.enter_context(addresses.dial(second.address, LIMIT_S))
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        member.sendall(leaving.read())
        wait_until(lambda: second.agent._acceptor._strangers._members)
        strangers = [stack.enter_context(dial(second)) for _ in range(5 * STRANGERS)]
        wait_until(lambda: len(ended_ones(strangers)) == 4 * STRANGERS)
        arrived.write(member.recv(1 << 16))
        tls.do_handshake()
        member.sendall(leaving.read())
        arrived.write(member.recv(1 << 16))
        assert tls.read(1) == b"\1"  # It accepts the certificate.


@pytest.mark.parametrize(
    "voucher",
    [
        new_voucher(Secret(bytes(32)), 1),
        new_voucher(KEY, 2),
        new_voucher(KEY, 1)[1:],
        new_voucher(KEY, 1).replace("weft", "worn"),
    ],
    ids=["another key", "for another worker", "cut", "another name"],
)
def test_a_false_voucher_is_none(pair: list[Member], voucher: str) -> None:
    first, second = pair
    with dial(second) as connection:
        connection.sendall(frame_with(voucher))
        wait_until(lambda: second.agent._acceptor._strangers._open)
        wait_until(lambda: not second.agent._acceptor._strangers._silent)
        assert not second.agent._acceptor._strangers._members
        assert greet_as(connection, first.agent.info.id) == ""


@pytest.fixture
def turned_out(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Ends the next connections before they are proven, three of them; returns those."""
    ended: list[socket.socket] = []
    greet = Acceptor._greet

    def greet_later_ones(acceptor: Acceptor, connection: socket.socket) -> Any:
        if len(ended) < 3:
            ended.append(connection)
            shut(connection)
        return greet(acceptor, connection)

    monkeypatch.setattr(Acceptor, "_greet", greet_later_ones)
    return ended


def test_a_newcomer_whose_connection_ends_introduces_itself_again(
    pair: list[Member], turned_out: list[socket.socket]
) -> None:
    first, second = pair
    first.agent.introduce(first.peer(second), LIMIT_S)
    assert len(turned_out) == 3


def test_a_worker_that_shuts_down_introduces_itself_no_more(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    ended: list[socket.socket] = []

    def turn_out(_: Acceptor, connection: socket.socket) -> None:
        connection.close()
        ended.append(connection)

    monkeypatch.setattr(Acceptor, "_greet", turn_out)
    with ThreadPoolExecutor(1) as pool:
        introduced = pool.submit(first.agent.introduce, first.peer(second), LIMIT_S)
        wait_until(lambda: len(ended) > 2)
        first.close()
        assert isinstance(introduced.exception(AT_ONCE_S), ConnectionError)


def test_members_get_in_during_a_flood(pair: list[Member]) -> None:
    first, second = pair
    flood: list[socket.socket] = []

    def pour() -> None:
        for _ in range(10):
            flood.append(dial(second))
            if len(flood) > 60:
                flood.pop(0).close()

    for _ in range(5):
        pour()
    first.agent.connect(first.peer(second))
    pour()
    second.agent.connect(second.peer(first))
    assert first.peer(second).lost is None
    for stranger in flood:
        stranger.close()
    wait_until(lambda: not second.agent._acceptor._strangers._open)


def test_the_worker_that_was_here_before_is_not_taken_for_this_one(pair: list[Member]) -> None:
    _, second = pair
    with dial(second) as connection:
        handshake = Handshake.dial(connection, KEY, time.monotonic() + LIMIT_S)
        handshake.send(Kind.HELLO, Greeting(0, facts={"to": 17}))
        assert handshake.receive(Kind.WELCOME).refusal == "the worker that was here is gone"


def test_who_closes_turns_away_who_has_not_said_who_it_is(pair: list[Member]) -> None:
    _, second = pair
    with dial(second) as stranger:
        wait_until(lambda: second.agent._acceptor._strangers._open)
        began_s = time.monotonic()
        second.close()
        assert time.monotonic() - began_s < AT_ONCE_S - 1
        assert is_hung_up_on(stranger)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname(), LIMIT_S) as late:
            second.agent._acceptor.accept(listener)
            assert is_hung_up_on(late)
