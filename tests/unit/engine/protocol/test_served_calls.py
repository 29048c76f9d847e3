"""Served calls: known from arrival to end, run at most once, answered if a caller waits."""

from __future__ import annotations

import math

import pytest

from tests.unit.engine.protocol.entries import Peer, Served
from torchweft.engine.wire.messages import NO_CREATION
from torchweft.errors import WorkerLost


@pytest.fixture
def peer() -> Peer:
    return Peer()




# Outcomes


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




# Functions that wait for a value


def test_a_function_that_has_waited_makes_its_value_while_it_is_referred_to(peer: Peer) -> None:
    call = Served(peer, number=0)
    call.begins(5, math.inf, 10.0)
    peer.lost = WorkerLost("lost")
    assert call.goes_on(None, 1e9)
    call.is_referred = False
    assert not call.goes_on(None, 1e9)
    assert [what for what, _ in call.told] == ["value 5"]


# Cancelling


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


