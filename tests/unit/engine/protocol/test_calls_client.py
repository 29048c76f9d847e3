"""The calls that a worker makes: each event, and the races between two events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.engine.protocol.entries import Asked, Peer, Served, answer, has_outcome
from torchweft.engine.protocol.calls import (
    CallClient,
    Complete,
    nest,
)
from torchweft.errors import CallCancelled, CallTimeout, ProtocolError, WorkerLost


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


def test_an_answer_ends_a_call_once(client: CallClient[Asked]) -> None:
    call, frame = sent(client), answer(1)
    assert client.answered(call.worker, frame) is call
    assert call.frame is frame
    assert has_outcome(call)
    assert client.answered(call.worker, answer(1)) is None
    assert client.cancelled(call, CallCancelled("late")) == []


def test_only_the_callee_answers_a_call(client: CallClient[Asked]) -> None:
    call = sent(client)
    with pytest.raises(ProtocolError, match="was made to another worker"):
        client.answered(call.worker + 1, answer(call.number))
    assert call.frame is None
    assert client.answered(call.worker, answer(call.number)) is call
    assert client.expire(math.inf) == ([], math.inf)
    assert call.error is None


# Before the first connection


@pytest.mark.parametrize(
    "end",
    [
        lambda client, call: client.cancelled(call, CallCancelled("given up")),
        lambda client, call: client.expire(5.0)[0],
        lambda client, call: client.parents_cancelled({call.parent}),
    ],
)
def test_a_kept_call_that_has_ended_is_not_sent_and_nobody_is_told(
    client: CallClient[Asked], end: Callable[..., Any]
) -> None:
    parent = Served(Peer())
    call = kept(client, timeout_s=5.0, parent=parent)
    assert end(client, call) == [Complete(call)]
    with pytest.raises(CallCancelled, match=r"function on worker 'worker1' ended before it was"):
        client.sending(call)
    assert client.not_sent(call, WorkerLost("lost")) == []
    assert not isinstance(call.error, WorkerLost)


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


@pytest.mark.parametrize("make", [sent, kept])
def test_a_withdrawn_call_was_never_there(
    client: CallClient[Asked], make: Callable[..., Asked]
) -> None:
    call = make(client)
    assert client.withdraw(call)
    assert not client.withdraw(call)
    assert client.expire(math.inf) == ([], math.inf)
    with pytest.raises(CallCancelled):
        client.sending(call)
    assert not has_outcome(call)


# Nested calls


def test_without_time_nothing_is_called() -> None:
    parent = Served(Peer())
    parent.deadline_s = 39.0
    with pytest.raises(CallTimeout, match=r"'callee' was not called.*'caller'") as caught:
        nest(parent, "callee", b"module:function", math.inf, 40.0)
    assert caught.value.worker == "callee"
    assert caught.value.call == "module:function"


@pytest.mark.parametrize("has_ended", [True, False])
def test_for_a_caller_that_has_given_up_nothing_is_called(has_ended: bool) -> None:
    parent = Served(Peer())
    parent.cancel()
    if has_ended:
        parent.end()
    with pytest.raises(CallCancelled, match=r"called for worker 'caller'.*detached") as caught:
        nest(parent, "callee", len, math.inf, 40.0)
    assert caught.value.call == "builtins.len"


def test_a_nested_call_that_was_cut_short_says_by_whom(client: CallClient[Asked]) -> None:
    parent = Served(Peer())
    parent.deadline_s = 5.0
    short, long = sent(client, timeout_s=5.0, parent=parent), sent(client, timeout_s=4.0)
    long.parent = parent
    client.expire(5.0)
    assert "the limit was that of worker 'caller'" in str(short.error)
    assert "'caller'" not in str(long.error)


def test_an_answered_call_needs_no_second_look(client: CallClient[Asked]) -> None:
    parent = Served(Peer())
    call = sent(client, parent=parent)
    client.answered(call.worker, answer(call.number))
    parent.cancel()
    assert client.opened(call, was_sent=True) == []


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


def test_a_loss_that_has_ended_the_call_is_not_raised(client: CallClient[Asked]) -> None:
    call, error = sent(client), WorkerLost("lost")
    assert client.worker_lost(1, lambda: error) == [Complete(call)]
    client.opened(call, was_sent=True, loss=lambda: error)
    answered = sent(client)
    client.answered(answered.worker, answer(answered.number))
    assert client.opened(answered, was_sent=True, loss=lambda: error) == []
