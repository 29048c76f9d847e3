"""Open calls: a caller that gives up tells the callee, and nested calls end with their parent."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of
from torchweft.engine.protocol.calls import ServedCall, SimpleRequest
from torchweft.engine.protocol.sessions import Unsent
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallCancelled, CallTimeout

LIMIT_S = 20.0


class Callee:
    """Takes the calls of one worker, and answers none."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._calls: queue.SimpleQueue[ServedCall] = queue.SimpleQueue()
        member.agent.receiver.on_calls(
            lambda peer, call: self._calls.put(call), self._refuse, ServedCall
        )

    def _refuse(self, peer: Peer, call: ServedCall) -> None:
        raise AssertionError("there is room")

    def next(self) -> ServedCall:
        """Returns the next call, once it is here."""
        return self._calls.get(timeout=LIMIT_S)

    def until_cancelled(self, call: ServedCall) -> None:
        """Blocks until a call is cancelled."""
        told: queue.SimpleQueue[None] = queue.SimpleQueue()
        call.on_cancel(lambda _: told.put(None))
        told.get(timeout=LIMIT_S)
        assert call.was_cancelled


@pytest.fixture
def pair() -> Iterator[tuple[Member, Callee]]:
    """A worker that calls, and the one that it calls."""
    with group_of(2) as (first, second):
        callee = Callee(second)
        first.start()
        second.start()
        yield first, callee


def ask(
    member: Member,
    to: int,
    timeout_s: float = math.inf,
    parent: ServedCall | None = None,
    on_done: Callable[[PendingCall], None] | None = None,
) -> PendingCall:
    peer = member.agent.peers[to]
    call = PendingCall(peer.id, peer.name, "function", timeout_s, on_done, parent)

    def message(number: int) -> list[bytes | bytearray | memoryview] | Frame:
        if peer.is_self:
            return Frame(Kind.CALL, 0, number, b"", ())
        return encode_frame(Kind.CALL, 0, number, b"")

    member.agent.calls.ask(peer, call, SimpleRequest(message))
    return call


def new_parent(member: Member, number: int = 1) -> ServedCall:
    return ServedCall(member.agent.peers[1], Frame(Kind.CALL, 0, number, b"", ()), 0.0)


def test_who_is_called_is_told_that_the_call_is_given_up(pair: tuple[Member, Callee]) -> None:
    first, callee = pair
    given_up, kept = ask(first, 1), ask(first, 1)
    served = [callee.next(), callee.next()]
    assert first.agent.calls.cancel(given_up, CallCancelled("given up"))
    (meant,) = [call for call in served if call.number == given_up.number]
    callee.until_cancelled(meant)
    (other,) = [call for call in served if call is not meant]
    assert not other.was_cancelled
    assert not kept.is_done
    assert first.agent.calls.cancel(kept, CallCancelled("given up, too"))


def test_who_is_called_is_told_that_the_time_is_up(pair: tuple[Member, Callee]) -> None:
    first, callee = pair
    call = ask(first, 1, timeout_s=0.5)  # A call whose time is up before it comes does not begin.
    callee.until_cancelled(callee.next())
    first.agent.calls.wait(call)
    assert isinstance(call.error, CallTimeout)


def test_calls_to_oneself_are_given_up_too() -> None:
    with group_of(1) as (member,):
        callee = Callee(member)
        member.start()
        call = ask(member, 0)
        served = callee.next()
        assert member.agent.calls.cancel(call, CallCancelled("given up"))
        callee.until_cancelled(served)


def test_what_is_nested_is_given_up_with_its_parent(pair: tuple[Member, Callee]) -> None:
    first, callee = pair
    parent, other = new_parent(first, 1), new_parent(first, 2)
    nested = [ask(first, 1, parent=parent) for _ in range(3)]
    others = [ask(first, 1), ask(first, 1, parent=other)]
    served = {call.number: call for call in [callee.next() for _ in range(5)]}
    first.agent.calls.cancel_nested({parent})
    for call in nested:
        first.agent.calls.wait(call)
        assert isinstance(call.error, CallCancelled)
        callee.until_cancelled(served[call.number])
    assert not any(call.is_done for call in others)
    assert not any(served[call.number].was_cancelled for call in others)
    assert len(first.agent.calls) == 2


def test_what_is_asked_just_after_its_parent_was_cancelled_ends_at_once(
    pair: tuple[Member, Callee],
) -> None:
    first, callee = pair
    first.agent.connect(first.agent.peers[1])  # Otherwise the call is not even sent.
    parent = new_parent(first)
    parent.cancel()
    call = ask(first, 1, parent=parent)
    assert isinstance(call.error, CallCancelled)
    callee.until_cancelled(callee.next())
    assert len(first.agent.calls) == 0


class ComesMeanwhile:
    """The connection comes between the caller's check and the moment to keep its request."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def keep(self, peer: Peer, unsent: Unsent) -> bool:
        self._member.agent.connect(peer)
        return False


@pytest.mark.parametrize("comes_meanwhile", [False, True])
def test_what_ends_while_its_request_is_made_is_cancelled_at_its_callee(
    pair: tuple[Member, Callee], monkeypatch: pytest.MonkeyPatch, comes_meanwhile: bool
) -> None:
    first, callee = pair
    peer = first.agent.peers[1]
    if comes_meanwhile:
        monkeypatch.setattr(first.agent.sender, "keep", ComesMeanwhile(first).keep)
    else:
        first.agent.connect(peer)
    parent = new_parent(first)
    call = PendingCall(peer.id, peer.name, "function", math.inf, None, parent)

    def message(number: int) -> list[bytes | bytearray | memoryview] | Frame:
        # Race: the cancellation by another thread reaches the callee before the call does.
        parent.cancel()
        first.agent.calls.cancel_nested({parent})
        return encode_frame(Kind.CALL, 0, number, b"")

    first.agent.calls.ask(peer, call, SimpleRequest(message))
    assert isinstance(call.error, CallCancelled)
    callee.until_cancelled(callee.next())
