from __future__ import annotations

import math
import threading

from tests.unit.engine.worker.group import Member, group_of
from torchweft.engine.protocol.calls import SimpleRequest
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer

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


def new_call(peer: Peer, timeout_s: float = math.inf) -> PendingCall:
    return PendingCall(peer.id, peer.name, "echo", timeout_s)


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
