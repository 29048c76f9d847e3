"""Open calls that end while their request is made, or whose parent has just ended."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator

import pytest

from tests.unit.engine.worker.group import Member, group_of
from torchweft.engine.protocol.calls import ServedCall, SimpleRequest
from torchweft.engine.protocol.sessions import Unsent
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallCancelled

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


def new_parent(member: Member) -> ServedCall:
    return ServedCall(member.agent.peers[1], Frame(Kind.CALL, 0, 1, b"", ()), 0.0)


def test_what_is_asked_just_after_its_parent_was_cancelled_ends_at_once(
    pair: tuple[Member, Callee],
) -> None:
    first, callee = pair
    first.agent.connect(first.agent.peers[1])  # Otherwise the call is not even sent.
    parent = new_parent(first)
    parent.cancel()
    peer = first.agent.peers[1]
    call = PendingCall(peer.id, peer.name, "function", math.inf, None, parent)
    request = SimpleRequest(lambda number: encode_frame(Kind.CALL, 0, number, b""))
    first.agent.calls.ask(peer, call, request)
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
        calls = first.agent.calls
        calls._act(calls._client.parents_cancelled({parent}))
        return encode_frame(Kind.CALL, 0, number, b"")

    first.agent.calls.ask(peer, call, SimpleRequest(message))
    assert isinstance(call.error, CallCancelled)
    callee.until_cancelled(callee.next())
