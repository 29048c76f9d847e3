"""Served calls: known from arrival to end, run at most once, answered if a caller waits."""

from __future__ import annotations

import math

import pytest

from tests.unit.engine.protocol.entries import Peer, Served
from torchweft.engine.protocol import calls
from torchweft.engine.protocol.calls import CallServer, has_awaited
from torchweft.engine.wire.messages import NO_CREATION
from torchweft.errors import ProtocolError, WorkerLost


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def server() -> CallServer:
    return CallServer()


def test_a_call_is_known_from_its_arrival_to_its_end(peer: Peer) -> None:
    call = Served(peer)
    assert peer.served == {7: call}
    call.end()
    assert peer.served == {}
    assert call.has_ended
    call.end()


def test_a_number_that_is_open_is_not_run_again(peer: Peer) -> None:
    call = Served(peer)
    with pytest.raises(ProtocolError, match="two calls have the number 7"):
        Served(peer)
    assert peer.served == {7: call}
    Served(Peer("another"))


def test_what_nobody_waits_for_has_no_number_to_be_known_by(peer: Peer) -> None:
    call = Served(peer, number=0)
    Served(peer, number=0)
    assert peer.served == {}
    call.end()
    assert call.has_ended


# Beginning


def test_a_call_begins_while_somebody_waits_for_it(peer: Peer) -> None:
    call = Served(peer, arrived_s=10.0)
    assert call.begins(NO_CREATION, 2.0, 12.0)
    assert call.deadline_s == 12.0
    assert peer.served == {7: call}
    assert call.remaining_s(11.5) == 0.5
    assert call.remaining_s(13.0) == 0.0


@pytest.mark.parametrize("why", ["late", "cancelled", "lost"])
def test_what_nobody_waits_for_does_not_begin(peer: Peer, why: str) -> None:
    call = Served(peer, arrived_s=10.0)
    if why == "cancelled":
        call.cancel()
    if why == "lost":
        peer.lost = WorkerLost("lost")
    assert not call.begins(NO_CREATION, 2.0, 12.1 if why == "late" else 11.0)
    assert call.has_ended
    assert peer.served == {}
    assert call.told == []


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_owner_of_references_decides_about_creations(peer: Peer, is_wanted: bool) -> None:
    call = Served(peer, number=0)
    call.is_wanted = is_wanted
    peer.lost = WorkerLost("lost")
    assert call.begins(5, 0.0, 99.0) is is_wanted
    assert call.has_ended is not is_wanted
    assert call.deadline_s == math.inf


# Outcomes


def test_a_result_and_an_error_are_answers(peer: Peer) -> None:
    error = ValueError("wrong")
    first, second = Served(peer, 1), Served(peer, 2)
    first("result", None)
    second(None, error)
    assert first.told == [(1, "result")]
    assert second.told == [(2, error)]
    assert peer.served == {}


def test_a_call_is_answered_once(peer: Peer) -> None:
    call = Served(peer)
    call("result", None)
    call("another", None)
    call(None, ValueError("wrong"))
    assert call.told == [(7, "result")]


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
def test_what_was_cancelled_is_not_answered(peer: Peer, error: Exception | None) -> None:
    call = Served(peer)
    call.cancel()
    call("result", error)
    assert call.told == []
    assert call.has_ended
    assert peer.served == {}


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


def test_a_value_is_in_the_making_from_its_begin_to_its_outcome(peer: Peer) -> None:
    call, unwanted = Served(peer, number=0), Served(peer, number=0)
    unwanted.is_wanted = False
    for each in (call, unwanted):
        each.begins(5, math.inf, 10.0)
    assert call.unfinished == {call}
    assert unwanted.unfinished == set()
    call("result", None)
    assert call.unfinished == set()
    assert call.owned is None


def test_an_error_ends_a_call_once_and_is_logged_afterwards(peer: Peer) -> None:
    call, error = Served(peer), ValueError("wrong")
    call.fail(error)
    assert call.told == [(7, error)]
    call.fail(error)
    assert call.told == [(7, error), "late"]


# Refusal


@pytest.mark.parametrize(("creation", "told"), [(NO_CREATION, 7), (5, "value 5")])
def test_a_refused_call_ends_with_the_error(peer: Peer, creation: int, told: object) -> None:
    call, error = Served(peer), calls.too_many_waiting("callee", "caller")
    call.refuse(creation, 2.0, 11.0, error)
    assert call.told == [(told, error)]
    assert call.has_ended
    assert peer.served == {}


@pytest.mark.parametrize("why", ["late", "cancelled", "lost"])
def test_a_caller_that_no_longer_waits_is_not_told_of_a_refusal(peer: Peer, why: str) -> None:
    call = Served(peer, arrived_s=10.0)
    if why == "cancelled":
        call.cancel()
    if why == "lost":
        peer.lost = WorkerLost("lost")
    call.refuse(NO_CREATION, 2.0, 12.1 if why == "late" else 11.0, ValueError("refused"))
    assert call.told == []
    assert call.has_ended


# Functions that wait for a value


def test_a_function_goes_on_when_the_value_is_ready(peer: Peer) -> None:
    call = Served(peer, arrived_s=10.0)
    call.begins(NO_CREATION, 2.0, 10.0)
    assert call.goes_on(None, 12.0)
    assert call.told == []
    assert not call.has_ended


def test_the_error_of_the_value_is_the_answer(peer: Peer) -> None:
    call, error = Served(peer), ValueError("not made")
    assert not call.goes_on(error, 11.0)
    assert call.told == [(7, error)]
    assert call.has_ended


@pytest.mark.parametrize("why", ["late", "cancelled", "lost"])
def test_a_function_that_waited_for_a_value_does_not_go_on_for_nobody(peer: Peer, why: str) -> None:
    call = Served(peer, arrived_s=10.0)
    call.begins(NO_CREATION, 2.0, 10.0)
    if why == "cancelled":
        call.cancel()
    if why == "lost":
        peer.lost = WorkerLost("lost")
    assert not call.goes_on(None, 12.1 if why == "late" else 11.0)
    assert call.has_ended
    assert call.told == [], "it would be told that it was cancelled, not that it was late"


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


def test_a_call_is_wanted_until_its_time_is_up(peer: Peer) -> None:
    call = Served(peer)
    assert call.deadline_s == math.inf
    assert not call.is_unwanted(1e9)
    call.deadline_s = 12.0
    assert not call.is_unwanted(12.0)
    assert call.is_unwanted(12.1)
    peer.lost = WorkerLost("lost")
    assert call.is_unwanted(0.0)


def test_a_value_is_wanted_while_its_caller_lives_or_somebody_refers_to_it(peer: Peer) -> None:
    call = Served(peer, 0)
    call.deadline_s = 1.0
    call.is_referred = False
    assert not call.is_unwanted(math.inf)
    peer.lost = WorkerLost("lost")
    assert call.is_unwanted(math.inf)
    call.is_referred = True
    assert not call.is_unwanted(math.inf)


def test_calls_are_cancelled_by_their_numbers(server: CallServer, peer: Peer) -> None:
    calls = [Served(peer, number) for number in range(1, 6)]
    assert not server.cancel_received(peer, [2, 4, 4, 99])
    assert [call.was_cancelled for call in calls] == [False, True, False, True, False]
    assert not server.cancel_received(Peer("another"), [1])
    assert not calls[0].was_cancelled


def test_nested_calls_of_many_are_cancelled_at_once(server: CallServer, peer: Peer) -> None:
    calls = [Served(peer, number) for number in range(1, 6)]
    for call in calls[:3]:
        call.has_nested = True
    for number in range(1, 6):
        assert server.cancel_received(peer, [number])
    assert server.take_cancelled_parents() == set(calls[:3])
    assert server.take_cancelled_parents() == set()


def test_the_calls_of_a_lost_worker_are_cancelled(server: CallServer, peer: Peer) -> None:
    calls = [Served(peer, number) for number in (1, 2)]
    other = Served(Peer("another"))
    calls[1].has_nested = True
    assert server.caller_lost(peer)
    assert all(call.was_cancelled for call in calls)
    assert not other.was_cancelled
    assert server.take_cancelled_parents() == {calls[1]}


def test_a_lost_worker_s_creations_are_cancelled_that_nobody_refers_to(
    server: CallServer, peer: Peer
) -> None:
    making = [Served(peer, 0), Served(peer, 0), Served(Peer("another"), 0)]
    making[1].is_referred = False
    making[2].is_referred = False
    peer.lost = WorkerLost("lost")
    assert not server.creations_lost(making, peer)
    assert [call.was_cancelled for call in making] == [False, True, False]


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


def test_a_call_is_awaited_until_its_end_or_until_nobody_waits(peer: Peer) -> None:
    assert not has_awaited([peer])
    answered, cancelled, another = Served(peer, 1), Served(peer, 2), Served(Peer("another"))
    Served(peer, 0)
    assert has_awaited([peer])
    answered("result", None)
    assert has_awaited([peer])
    cancelled.cancel()
    assert not has_awaited([peer])
    assert has_awaited([peer, another.peer])
    another.peer.lost = WorkerLost("lost")
    assert not has_awaited([peer, another.peer])
