"""Calls that wait for a connection: sent once, or taken back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.protocol.entries import Asked
from torchweft.engine.protocol.calls import (
    CallClient,
    Complete,
    KeptCall,
    timed_out,
)
from torchweft.engine.wire.frames import Buffer
from torchweft.errors import CallCancelled


class Request:
    """A request that notes whether it was taken back."""

    def __init__(self) -> None:
        self.was_taken_back = False

    def message(self, number: int) -> list[Buffer]:
        return [b"call %d" % number]

    def take_back(self) -> None:
        self.was_taken_back = True


class Kept:
    """A kept call, and the actions that came of it."""

    def __init__(self) -> None:
        self.client: CallClient[Asked] = CallClient()
        self.call, self.request = Asked(timeout_s=5.0), Request()
        self.client.keep(self.call)
        self.actions: list[Any] = []
        self.unsent = KeptCall(self.client, self.call, self.request, self.actions.extend)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_a_call_that_ends_just_before_it_is_sent_is_not_sent(kept: Kept) -> None:
    assert kept.unsent.is_wanted()
    kept.client.expire(5.0)
    with pytest.raises(CallCancelled, match="ended before it was sent") as caught:
        kept.unsent.make()
    kept.unsent.drop(caught.value)
    assert kept.request.was_taken_back
    assert kept.actions == []


def test_a_thread_that_drops_a_call_leaves_its_end_to_the_thread_that_ends_it(kept: Kept) -> None:
    """Race: the entry is out of the table, and the thread that took it has not gone on."""
    taken, _ = kept.client.take_expired(5.0)
    assert not kept.unsent.is_wanted()
    kept.unsent.drop(None)
    actions = kept.client._end(taken, lambda call, was_sent: timed_out(call, 5.0, was_sent))
    assert actions == [Complete(kept.call)], "it was never sent"
    assert "it was not sent" in str(kept.call.error)
