from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of
from torchweft.engine.protocol.calls import SimpleRequest
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallTimeout, NotInitialized, UnknownWorker, WorkerLost
from torchweft.ids import WorkerInfo

LIMIT_S = 20.0


def message(peer: Peer, kind: Kind, number: int, control: bytes = b"") -> Outgoing:
    if peer.is_self:
        return Frame(kind, 0, number, control, ())
    return encode_frame(kind, 0, number, control)


def answer_calls(member: Member) -> None:
    """Makes a member answer each call with its control part; a call "never" gets no answer."""

    def answer(peer: Peer, frame: Frame) -> None:
        if bytes(frame.control) != b"never":
            answer = message(peer, Kind.REPLY, frame.id, bytes(frame.control))
            member.agent.sender.send(peer, answer)

    member.agent.receiver.on(Kind.CALL, answer, inline=False)


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    with group_of(2, over=request.param) as members:
        for member in members:
            answer_calls(member)
            member.start()
        yield members


def new_call(peer: Peer, timeout_s: float = math.inf) -> PendingCall:
    return PendingCall(peer.id, peer.name, "echo", timeout_s)


def ask(member: Member, peer: Peer, text: bytes, timeout_s: float = math.inf) -> PendingCall:
    call = new_call(peer, timeout_s)
    member.agent.calls.ask(
        peer, call, SimpleRequest(lambda number: message(peer, Kind.CALL, number, text))
    )
    return call


def ask_and_wait(member: Member, peer: Peer, text: bytes) -> PendingCall:
    call = new_call(peer)
    member.agent.calls.ask_and_wait(
        peer, call, SimpleRequest(lambda number: message(peer, Kind.CALL, number, text))
    )
    return call


def answer_of(call: PendingCall) -> bytes:
    assert call.error is None
    assert call.frame is not None
    return bytes(call.frame.control)


@pytest.mark.parametrize("to", [0, 1], ids=["oneself", "another"])
def test_a_call_is_answered(pair: list[Member], to: int) -> None:
    first = pair[0]
    peer = first.agent.peers[to]
    for number in range(20):
        text = b"hello %d" % number
        assert answer_of(ask_and_wait(first, peer, text)) == text
        call = ask(first, peer, text)
        first.agent.calls.wait(call)
        assert answer_of(call) == text
    assert len(first.agent.calls) == 0


def test_both_sides_call_each_other_from_many_threads(pair: list[Member]) -> None:
    wrong: list[bytes] = []

    def call_often(member: Member, other: Member, name: int) -> None:
        peer = member.peer(other)
        for number in range(40):
            text = b"%d %d" % (name, number)
            answer = answer_of(ask_and_wait(member, peer, text))
            if answer != text:
                wrong.append(answer)

    threads = [
        threading.Thread(target=call_often, args=(*pair[:: 1 if name % 2 else -1], name))
        for name in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert wrong == []
    assert all(len(member.agent.links.all()) == 1 for member in pair)


def test_answers_are_told_to_callbacks_too(pair: list[Member]) -> None:
    first, second = pair
    peer, told = first.peer(second), threading.Event()
    call = new_call(peer)
    call.on_done = lambda done: told.set()
    first.agent.calls.ask(
        peer, call, SimpleRequest(lambda number: message(peer, Kind.CALL, number, b"x"))
    )
    assert told.wait(LIMIT_S)
    assert answer_of(call) == b"x"


def test_workers_that_dial_each_other_while_their_only_threads_are_busy_meet() -> None:
    with group_of(2, threads=1) as members:
        start = threading.Barrier(2)
        ended = threading.Semaphore(0)
        for member in members:
            answer_calls(member)
            member.start()

        def call_other(member: Member, other: Member) -> None:
            start.wait(LIMIT_S)
            assert answer_of(ask_and_wait(member, member.peer(other), b"hello")) == b"hello"
            ended.release()

        for member, other in (members, members[::-1]):
            member.agent.reactor.submit_task(lambda m, _, o=other: call_other(m, o), member)
        for _ in members:
            assert ended.acquire(timeout=5.0), "each waits for the other to accept"


def test_a_call_without_an_answer_ends_with_its_time(pair: list[Member]) -> None:
    first, second = pair
    call = ask(first, first.peer(second), b"never", timeout_s=0.02)
    first.agent.calls.wait(call)
    assert isinstance(call.error, CallTimeout)
    told = threading.Event()
    peer = first.peer(second)
    unwatched = new_call(peer, 0.02)
    unwatched.on_done = lambda done: told.set()
    first.agent.calls.ask(
        peer, unwatched, SimpleRequest(lambda number: message(peer, Kind.CALL, number, b"never"))
    )
    assert told.wait(0.5), "nobody looked at the clock in time"


def test_a_cancelled_call_ends_once(pair: list[Member]) -> None:
    first, second = pair
    call = ask(first, first.peer(second), b"never")
    error = ValueError("given up")
    assert first.agent.calls.cancel(call, error)
    assert not first.agent.calls.cancel(call, error)
    first.agent.calls.wait(call)
    assert call.error is error


def test_a_worker_that_goes_is_lost_for_who_waits_and_for_who_asks_later() -> None:
    with group_of(2) as (first, second):
        for member in (first, second):
            answer_calls(member)
            member.start()
        peer, told = first.peer(second), []
        first.agent.on_lost(told.append)
        ask_and_wait(first, peer, b"hello")
        call = ask(first, peer, b"never")
        second.close()
        first.agent.calls.wait(call)
        assert isinstance(call.error, WorkerLost)
        assert call.error.worker == "worker1"
        with pytest.raises(WorkerLost, match="worker1"):
            ask(first, peer, b"x")
        deadline_s = time.monotonic() + LIMIT_S
        while not told and time.monotonic() < deadline_s:
            first.agent.reactor.wake()
        assert told == [peer]
        assert len(first.agent.calls) == 0


def test_nonsense_from_a_peer_ends_the_connection_and_nothing_else(
    pair: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    peer = first.peer(second)
    call = ask(first, peer, b"never")
    link = second.agent.connect(second.peer(first))
    link.send([encode_frame(250, 0, 0, b"?")[0]], may_block=False)
    first.agent.calls.wait(call)
    assert isinstance(call.error, WorkerLost)
    assert "kind 250 is unknown" in caplog.text
    assert answer_of(ask_and_wait(first, first.agent.me, b"still here")) == b"still here"


def test_what_still_waits_when_the_agent_closes_is_told() -> None:
    with group_of(2) as (first, second):
        for member in (first, second):
            answer_calls(member)
            member.start()
        call = ask(first, first.peer(second), b"never")
        first.close()
        assert call.is_done
        assert isinstance(call.error, NotInitialized)
        with pytest.raises(NotInitialized):
            ask(first, first.agent.me, b"x")


def test_workers_are_found_by_name_rank_and_info(pair: list[Member]) -> None:
    agent = pair[0].agent
    assert agent.find("worker1") is agent.peers[1]
    assert agent.find(1) is agent.peers[1]
    assert agent.find(WorkerInfo("worker1", 1)) is agent.peers[1]


@pytest.mark.parametrize("to", ["worker2", 2, -1, WorkerInfo("worker1", 0)])
def test_who_is_not_found_is_told_with_who_there_is(pair: list[Member], to: object) -> None:
    with pytest.raises(UnknownWorker, match=r"the group has 'worker0' \(0\), 'worker1' \(1\)"):
        pair[0].agent.find(to)  # type: ignore[arg-type]


def test_traffic_is_counted_on_both_sides(pair: list[Member]) -> None:
    first, second = pair
    # Otherwise another thread writes the call, and may count its bytes after the answer arrives.
    first.agent.connect(first.peer(second))
    ask_and_wait(first, first.peer(second), b"x" * 10_000)
    assert first.agent.traffic().bytes_sent >= 10_000
    assert first.agent.traffic().bytes_received >= 10_000
    # Bytes are counted after they are written, so the answer may arrive first.
    second.agent.close()
    assert second.agent.traffic().bytes_sent >= 10_000
