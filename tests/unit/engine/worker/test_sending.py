"""First messages to a worker that listens but is silent: no thread waits, no message is lost."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of, wait_until
from torchweft.engine.protocol.calls import SimpleRequest
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.errors import NotInitialized

LIMIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[list[Member]]:
    """A running worker, and another that only listens until it is started."""
    with group_of(2) as members:
        members[0].start()
        yield members


class Request:
    """A call with ``text``, which is added to ``taken_back`` if the call is not sent."""

    def __init__(self, text: bytes, taken_back: list[bytes]) -> None:
        self._text = text
        self._taken_back = taken_back

    def message(self, number: int) -> Outgoing:
        return encode_frame(Kind.CALL, 0, number, self._text)

    def take_back(self) -> None:
        self._taken_back.append(self._text)


def ask(
    member: Member,
    peer: Peer,
    text: bytes,
    timeout_s: float = math.inf,
    taken_back: list[bytes] | None = None,
) -> PendingCall:
    call = PendingCall(peer.id, peer.name, "function", timeout_s)

    member.agent.calls.ask(peer, call, Request(text, [] if taken_back is None else taken_back))
    return call


def collect(member: Member) -> queue.SimpleQueue[bytes]:
    """Makes a member collect the texts of calls and reference messages, and answer the calls."""
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def on_call(peer: Peer, frame: Frame) -> None:
        arrived.put(bytes(frame.control))
        member.agent.sender.send(peer, encode_frame(Kind.REPLY, 0, frame.id, b""))

    member.agent.receiver.on(Kind.CALL, on_call, inline=True)
    member.agent.receiver.on(
        Kind.REFERENCES, lambda _, frame: arrived.put(bytes(frame.control)), inline=True
    )
    return arrived


def test_what_is_sent_while_kept_messages_leave_does_not_overtake_them(pair: list[Member]) -> None:
    first, second = pair
    peer = first.peer(second)
    arrived = collect(second)
    made, go_on = threading.Event(), threading.Event()

    def slowly(number: int) -> Outgoing:
        made.set()
        assert go_on.wait(LIMIT_S)
        return encode_frame(Kind.CALL, 0, number, b"kept")

    call = PendingCall(peer.id, peer.name, "function", math.inf)
    first.agent.calls.ask(peer, call, SimpleRequest(slowly))
    second.start()
    assert made.wait(LIMIT_S)
    assert peer.link is not None
    later = ask(first, peer, b"later")
    go_on.set()
    assert [arrived.get(timeout=LIMIT_S) for _ in range(2)] == [b"kept", b"later"]
    for each in (call, later):
        first.agent.calls.wait(each)


def test_nobody_connects_any_more_when_nobody_waits(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    peer = first.peer(second)
    monkeypatch.setattr(first.agent.sender, "_attempt_s", 0.05)
    taken_back: list[bytes] = []
    call = ask(first, peer, b"late", 0.05, taken_back)
    first.agent.calls.wait(call)
    wait_until(lambda: not peer.unsent, "the end of the attempts")
    assert taken_back == [b"late"]
    assert peer.lost is None


def test_a_message_connects_if_an_earlier_one_was_interrupted(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    peer = first.peer(second)
    arrived = collect(second)
    second.start()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(first.agent.reactor, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(first, peer, b"interrupted")
    call = ask(first, peer, b"later")
    first.agent.calls.wait(call)
    assert call.error is None
    assert arrived.get(timeout=LIMIT_S) == b"later"


def test_a_request_that_cannot_be_made_is_the_calls_error(pair: list[Member]) -> None:
    first, second = pair
    peer = first.peer(second)
    arrived = collect(second)
    call = PendingCall(peer.id, peer.name, "function", LIMIT_S)
    first.agent.calls.ask(peer, call, SimpleRequest(lambda number: [][number]))
    after = ask(first, peer, b"after")
    second.start()
    first.agent.calls.wait(call)
    assert isinstance(call.error, IndexError)
    assert arrived.get(timeout=LIMIT_S) == b"after"
    first.agent.calls.wait(after)


def test_leaving_does_not_wait_for_it(pair: list[Member]) -> None:
    first, second = pair
    peer = first.peer(second)
    taken_back: list[bytes] = []
    call = ask(first, peer, b"kept", math.inf, taken_back)
    began_s = time.monotonic()
    first.close()
    assert time.monotonic() - began_s < 2.0
    assert isinstance(call.error, NotInitialized)
    assert taken_back == [b"kept"]
    with pytest.raises(NotInitialized):
        ask(first, peer, b"too late")
