"""Served calls are cancelled by number, or with their caller, and nested calls with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchweft.engine.protocol.calls import ServedCall
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind, encode_ints
from torchweft.engine.worker.calls import Cancelling
from torchweft.engine.worker.peers import Peer


class Agent:
    """Stands in for the parts of an agent: records cancellations and runs submitted functions."""

    cancelling: Cancelling

    def __init__(self) -> None:
        self.handlers: dict[Kind, Callable[[Peer, Frame], None]] = {}
        self.submitted: list[Callable[[object, object], None]] = []
        self.cancelled: list[set[ServedCall]] = []

    def on(self, kind: Kind, handler: Callable[[Peer, Frame], None], *, inline: bool) -> None:
        assert inline
        self.handlers[kind] = handler

    def submit(self, function: Callable[[object, object], None]) -> None:
        self.submitted.append(function)

    def cancel_nested(self, parents: set[ServedCall]) -> None:
        self.cancelled.append(parents)

    def run_submitted(self) -> None:
        submitted, self.submitted = self.submitted, []
        for function in submitted:
            function(None, None)


@pytest.fixture
def agent() -> Agent:
    agent = Agent()
    parts: Any = agent
    agent.cancelling = Cancelling(reactor=parts, calls=parts, receiver=parts)
    return agent


@pytest.fixture
def peer() -> Peer:
    registration = Registration("caller", 1, ("unix:nowhere",), main="tests")
    return Peer(registration, main_by_name=False, is_self=False)


def new_call(peer: Peer, number: int = 7, arrived_s: float = 10.0) -> ServedCall:
    return ServedCall(peer, Frame(Kind.CALL, 0, number, b"", ()), arrived_s)


def cancel(agent: Agent, peer: Peer, *numbers: int) -> None:
    agent.handlers[Kind.CANCEL](peer, Frame(Kind.CANCEL, 0, 0, encode_ints(*numbers), ()))


def test_calls_are_cancelled_by_their_numbers(agent: Agent, peer: Peer) -> None:
    calls = [new_call(peer, number) for number in range(1, 6)]
    cancel(agent, peer, 2, 4)
    assert [call.was_cancelled for call in calls] == [False, True, False, True, False]
    assert calls[1].is_unwanted(0.0)
    assert agent.submitted == []


def test_what_is_not_known_has_ended(agent: Agent, peer: Peer) -> None:
    ended = new_call(peer)
    ended.end()
    cancel(agent, peer, 7, 99)
    assert not ended.was_cancelled
    assert peer.served == {}


def test_cancelling_twice_is_cancelling_once(agent: Agent, peer: Peer) -> None:
    call = new_call(peer)
    cancel(agent, peer, 7)
    cancel(agent, peer, 7, 7)
    assert call.was_cancelled


@pytest.mark.parametrize("is_early", [True, False])
def test_who_wants_to_know_is_called_back(agent: Agent, peer: Peer, is_early: bool) -> None:
    call, told = new_call(peer), []
    if is_early:
        cancel(agent, peer, 7)
    call.on_cancel(lambda _: told.append("cancelled"))
    if not is_early:
        assert told == []
        cancel(agent, peer, 7)
    assert told == ["cancelled"]


def test_what_is_nested_is_cancelled_once_for_many(agent: Agent, peer: Peer) -> None:
    calls = [new_call(peer, number) for number in range(1, 6)]
    for call in calls[:3]:
        call.has_nested = True
    for number in range(1, 6):
        cancel(agent, peer, number)
    assert agent.cancelled == []
    agent.run_submitted()
    assert agent.cancelled == [set(calls[:3])]
    agent.run_submitted()
    assert agent.cancelled == [set(calls[:3])]


def test_the_calls_of_a_lost_worker_are_cancelled(agent: Agent, peer: Peer) -> None:
    calls: list[Any] = [new_call(peer, number) for number in (1, 2)]
    calls[1].has_nested = True
    agent.cancelling.peer_lost(peer)
    agent.run_submitted()
    assert all(call.was_cancelled for call in calls)
    assert agent.cancelled == [{calls[1]}]
