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
    TellCancelled,
    nest,
)
from torchweft.errors import CallCancelled, CallTimeout, NotInitialized, ProtocolError, WorkerLost


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


def test_a_call_whose_time_is_up_ends_and_its_callee_is_told(client: CallClient[Asked]) -> None:
    late, other, later = (sent(client, timeout_s=limit_s) for limit_s in (1.0, 0.5, 9.0))
    to_another = sent(client, 2, timeout_s=1.0)
    actions, next_s = client.expire(1.0)
    assert actions == [
        *(Complete(call) for call in (late, other, to_another)),
        TellCancelled(1, (late.number, other.number)),
        TellCancelled(2, (to_another.number,)),
    ]
    assert isinstance(late.error, CallTimeout)
    assert next_s == 9.0
    assert client.answered(late.worker, answer(late.number)) is None
    assert later.number in client.entries


def test_a_cancelled_call_ends_with_the_given_error(client: CallClient[Asked]) -> None:
    call, error = sent(client), CallCancelled("given up")
    assert client.cancelled(call, error) == [Complete(call), TellCancelled(1, (1,))]
    assert call.error is error
    assert client.cancelled(call, CallCancelled("again")) == []
    assert call.error is error


def test_the_calls_to_a_lost_worker_fail_each_with_its_own_error(client: CallClient[Asked]) -> None:
    calls = [sent(client, 1), kept(client, 1), sent(client, 2)]
    actions = client.worker_lost(1, lambda: WorkerLost("lost"))
    assert actions == [Complete(calls[0]), Complete(calls[1])], "nobody is there to be told"
    assert calls[0].error is not calls[1].error
    assert not has_outcome(calls[2])


def test_all_calls_fail_when_the_worker_leaves(client: CallClient[Asked]) -> None:
    calls, error = [sent(client), kept(client)], NotInitialized("shut down")
    assert client.closed(error) == calls
    assert [call.error for call in calls] == [error, error]
    assert len(client) == 0


# Before the first connection


def test_a_kept_call_is_sent_once_there_is_a_connection(client: CallClient[Asked]) -> None:
    call = kept(client)
    assert client.total == call.number == 1
    client.sending(call)
    assert client.cancelled(call, CallCancelled("x")) == [Complete(call), TellCancelled(1, (1,))]


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


def test_a_kept_call_fails_with_its_connection(client: CallClient[Asked]) -> None:
    call, error = kept(client), WorkerLost("nobody is there")
    assert client.not_sent(call, error) == [Complete(call)]
    assert call.error is error


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


def test_a_nested_call_has_what_is_left() -> None:
    parent = Served(Peer())
    assert not parent.has_nested
    parent.deadline_s = 100.0
    assert nest(parent, "callee", len, math.inf, 40.0) == (parent, 60.0)
    assert nest(parent, "callee", len, 5.0, 40.0) == (parent, 5.0)
    assert parent.has_nested


def test_after_the_answer_nothing_is_nested() -> None:
    parent = Served(Peer())
    parent("result", None)
    assert nest(parent, "callee", len, 500.0, 40.0) == (None, 500.0)
    assert not parent.has_nested


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


def test_nested_calls_end_with_their_parents(client: CallClient[Asked]) -> None:
    parents = [Served(Peer(), number) for number in range(3)]
    calls = [sent(client, parent=parent) for parent in [*parents, None]]
    assert client.parents_cancelled(set(parents[:2])) == [
        Complete(calls[0]),
        Complete(calls[1]),
        TellCancelled(1, (1, 2)),
    ]
    assert isinstance(calls[0].error, CallCancelled)
    assert "called for worker 'caller', which has given up" in str(calls[0].error)
    assert (calls[0].error.worker, calls[0].error.call) == ("worker1", "module:function")
    assert not has_outcome(calls[2])
    assert not has_outcome(calls[3])


def test_a_nested_call_that_was_cut_short_says_by_whom(client: CallClient[Asked]) -> None:
    parent = Served(Peer())
    parent.deadline_s = 5.0
    short, long = sent(client, timeout_s=5.0, parent=parent), sent(client, timeout_s=4.0)
    long.parent = parent
    client.expire(5.0)
    assert "the limit was that of worker 'caller'" in str(short.error)
    assert "'caller'" not in str(long.error)


def test_what_is_asked_just_after_its_parent_was_cancelled_ends(client: CallClient[Asked]) -> None:
    parent = Served(Peer())
    parent.cancel()
    assert client.parents_cancelled({parent}) == [], "it is not there yet"
    call = sent(client, parent=parent)
    assert client.opened(call, was_sent=True) == [Complete(call), TellCancelled(1, (1,))]
    assert isinstance(call.error, CallCancelled)


def test_a_callee_is_told_again_that_was_told_before_the_request(client: CallClient[Asked]) -> None:
    parent = Served(Peer())
    call = sent(client, parent=parent)
    parent.cancel()
    assert client.parents_cancelled({parent}) == [Complete(call), TellCancelled(1, (1,))]
    # Only now is the request written.
    assert client.opened(call, was_sent=True) == [TellCancelled(1, (1,))]
    assert client.opened(call, was_sent=False) == []


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
