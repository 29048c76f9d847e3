"""The calls that a worker makes: each event, and the races between two events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.engine.protocol.entries import Asked, Peer, Served, answer, has_outcome
from torchweft.engine.protocol.calls import (
    CallClient,
)
from torchweft.errors import CallTimeout, ProtocolError, WorkerLost


@pytest.fixture
def client() -> CallClient[Asked]:
    return CallClient()


def sent(client: CallClient[Asked], *args: Any, **kwargs: Any) -> Asked:
    call = Asked(*args, **kwargs)
    client.add(call)
    return call


def kept(client: CallClient[Asked], *args: Any, **kwargs: Any) -> Asked:
    call = Asked(*args, **kwargs)
    client.keep(call)
    return call


def test_only_the_callee_answers_a_call(client: CallClient[Asked]) -> None:
    call = sent(client)
    with pytest.raises(ProtocolError, match="was made to another worker"):
        client.answered(call.worker + 1, answer(call.number))
    assert call.frame is None
    assert client.answered(call.worker, answer(call.number)) is call
    assert client.expire(math.inf) == ([], math.inf)
    assert call.error is None


# Before the first connection


def test_a_timeout_says_whether_the_call_was_sent(client: CallClient[Asked]) -> None:
    first, second = sent(client, timeout_s=0.25), kept(client, timeout_s=0.25)
    client.expire(0.5)
    assert isinstance(first.error, TimeoutError)
    assert "ran for more than set timeout (250 ms)" in str(first.error)
    assert "longer timeout=" in str(first.error)
    assert "it was not sent" in str(second.error)
    assert isinstance(second.error, CallTimeout)
    assert (second.error.worker, second.error.call) == ("worker1", "module:function")
    assert second.error.elapsed_s == 0.5


# Nested calls


def test_a_nested_call_that_was_cut_short_says_by_whom(client: CallClient[Asked]) -> None:
    parent = Served(Peer())
    parent.deadline_s = 5.0
    short, long = sent(client, timeout_s=5.0, parent=parent), sent(client, timeout_s=4.0)
    long.parent = parent
    client.expire(5.0)
    assert "the limit was that of worker 'caller'" in str(short.error)
    assert "'caller'" not in str(long.error)


# After the request was written


@pytest.mark.parametrize("make", [sent, kept])
def test_a_loss_that_came_before_the_call_is_raised_once(
    client: CallClient[Asked], make: Callable[..., Asked]
) -> None:
    error = WorkerLost("lost")
    assert client.worker_lost(1, lambda: error) == [], "it is not there yet"
    call = make(client)
    with pytest.raises(WorkerLost) as caught:
        client.opened(call, was_sent=make is sent, loss=lambda: error)
    assert caught.value is error
    assert call.number not in client.entries
    assert not has_outcome(call)
