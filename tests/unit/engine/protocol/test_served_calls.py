"""Errors of served calls: one ends a call once, or takes the place of an outcome."""

from __future__ import annotations

import pytest

from tests.unit.engine.protocol.entries import Peer, Served
from torchweft.engine.wire.messages import NO_CREATION


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
