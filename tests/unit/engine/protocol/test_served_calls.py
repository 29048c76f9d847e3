"""Served calls: known from arrival to end, run at most once, answered if a caller waits."""

from __future__ import annotations

import math

import pytest

from tests.unit.engine.protocol.entries import Peer, Served
from torchweft.engine.protocol.calls import CallServer
from torchweft.engine.wire.messages import NO_CREATION
from torchweft.errors import ProtocolError, WorkerLost


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def server() -> CallServer:
    return CallServer()


def test_a_number_that_is_open_is_not_run_again(peer: Peer) -> None:
    call = Served(peer)
    with pytest.raises(ProtocolError, match="two calls have the number 7"):
        Served(peer)
    assert peer.served == {7: call}
    Served(Peer("another"))


# Beginning


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_owner_of_references_decides_about_creations(peer: Peer, is_wanted: bool) -> None:
    call = Served(peer, number=0)
    call.is_wanted = is_wanted
    peer.lost = WorkerLost("lost")
    assert call.begins(5, 0.0, 99.0) is is_wanted
    assert call.has_ended is not is_wanted
    assert call.deadline_s == math.inf


# Outcomes


def test_a_function_that_was_told_that_nobody_waits_is_not_answered(peer: Peer) -> None:
    call = Served(peer)
    call.deadline_s = 12.0
    assert not call.notice_unwanted(12.0)
    assert call.notice_unwanted(12.1)
    call("given up", None)
    assert call.told == []


def test_a_creation_becomes_a_value_also_where_it_was_cancelled(peer: Peer) -> None:
    call = Served(peer, number=0)
    call.begins(5, math.inf, 10.0)
    call.cancel()
    call("result", None)
    call("another", None)
    assert call.told == [("value 5", "result")]


@pytest.mark.parametrize(("creation", "told"), [(NO_CREATION, 7), (5, "value 5")])
def test_an_error_is_delivered_instead_of_an_outcome_that_cannot_be(
    peer: Peer, creation: int, told: object
) -> None:
    call = Served(peer)
    assert call.begins(creation, 2.0, 11.0)
    call.failure = MemoryError("no room")
    call("result", None)
    ((where, error),) = call.told
    assert where == told
    assert str(error) == "instead of MemoryError('no room')"
    assert call.has_ended
    assert call.owned is None
    assert peer.served == {}


def test_an_error_ends_a_call_once_and_is_logged_afterwards(peer: Peer) -> None:
    call, error = Served(peer), ValueError("wrong")
    call.fail(error)
    assert call.told == [(7, error)]
    call.fail(error)
    assert call.told == [(7, error), "late"]


# Refusal


# Functions that wait for a value


def test_a_function_that_has_waited_makes_its_value_while_it_is_referred_to(peer: Peer) -> None:
    call = Served(peer, number=0)
    call.begins(5, math.inf, 10.0)
    peer.lost = WorkerLost("lost")
    assert call.goes_on(None, 1e9)
    call.is_referred = False
    assert not call.goes_on(None, 1e9)
    assert [what for what, _ in call.told] == ["value 5"]


def test_a_creation_that_gives_up_waiting_has_an_error_for_its_value(peer: Peer) -> None:
    call, creation = Served(peer), Served(peer, number=0)
    call.cancel()
    call.give_up()
    assert call.told == []
    creation.begins(5, math.inf, 10.0)
    creation.cancel()
    creation.give_up()
    ((where, error),) = creation.told
    assert where == "value 5"
    assert "given the call up" in str(error)


# Cancelling


def test_a_value_is_wanted_while_its_caller_lives_or_somebody_refers_to_it(peer: Peer) -> None:
    call = Served(peer, 0)
    call.deadline_s = 1.0
    call.is_referred = False
    assert not call.is_unwanted(math.inf)
    peer.lost = WorkerLost("lost")
    assert call.is_unwanted(math.inf)
    call.is_referred = True
    assert not call.is_unwanted(math.inf)


def test_nested_calls_of_many_are_cancelled_at_once(server: CallServer, peer: Peer) -> None:
    calls = [Served(peer, number) for number in range(1, 6)]
    for call in calls[:3]:
        call.has_nested = True
    for number in range(1, 6):
        assert server.cancel_received(peer, [number])
    assert server.take_cancelled_parents() == set(calls[:3])
    assert server.take_cancelled_parents() == set()


@pytest.mark.parametrize("is_early", [True, False])
def test_who_wants_to_know_is_called_back(peer: Peer, is_early: bool) -> None:
    call, told = Served(peer), []
    if is_early:
        call.cancel()
    call.on_cancel(lambda _: told.append("cancelled"))
    if not is_early:
        assert told == []
        call.cancel()
    assert told == ["cancelled"]


def test_nobody_is_called_back_after_the_end(peer: Peer) -> None:
    for end in (Served.end, lambda call: call("result", None)):
        call, told = Served(peer), []
        call.on_cancel(lambda _, told=told: told.append("cancelled"))
        end(call)
        call.cancel()
        assert told == []


# Leaving
