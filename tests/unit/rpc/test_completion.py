"""The outcome of a call: an answer, a value, or nothing if neither is wanted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import OwnedValue
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.rpc.functions import async_execution
from torchweft.rpc.serving import Call, WhenReady, settle

REFERENCE = (1, 0, 5)


class Worker:
    """Stands in for a worker: records its answers and queues its tasks."""

    name = "callee"
    on_failure = carrier = None
    watchers = ()

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.unfinished: set[object] = set()
        self.serving: dict[int, object] = {}
        self.owned: OwnedValue | None = OwnedValue()
        self.tasks: list[tuple[Any, Any]] = []
        self.is_referred_to = True
        self.id = 0

    def __getattr__(self, name: str) -> Worker:
        """Serves as its own agent, info, me, references and reactor."""
        return self

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        self.answers.append((number, result))

    def reply_error(self, peer: Peer, number: int, error: BaseException) -> None:
        self.answers.append((number, error))

    def created(self, reference: Any) -> OwnedValue | None:
        assert tuple(reference) == REFERENCE
        return self.owned

    def is_owned(self, reference: Any) -> bool:
        return self.is_referred_to

    def submit_task(self, function: Any, first: Any) -> None:
        self.tasks.append((function, first))

    def run_tasks(self) -> None:
        tasks, self.tasks = self.tasks, []
        for function, first in tasks:
            function(first, None)


@pytest.fixture
def worker() -> Any:
    return Worker()


def new_call(worker: Any, number: int = 7) -> Call:
    registration = Registration("caller", 1, ("unix:nowhere",), main="tests")
    peer = Peer(registration, main_by_name=False, is_self=False)
    call = Call(peer, Frame(Kind.CALL, 0, number, b"", ()), 0.0)
    call.worker, call.context_id, call.owned = worker, 0, None
    return call


def function() -> None:
    """Stands for a called function of which only the result matters."""


def test_a_result_and_an_error_are_answers(worker: Any) -> None:
    error = ValueError("wrong")
    new_call(worker, 1)("result", None)
    new_call(worker, 2)(None, error)
    assert worker.answers == [(1, "result"), (2, error)]


def test_an_answered_call_has_ended(worker: Any) -> None:
    call = new_call(worker)
    call("result", None)
    assert call.has_ended
    assert call.peer.served == {}


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
def test_what_was_cancelled_is_not_answered(worker: Any, error: Exception | None) -> None:
    call = new_call(worker)
    call.cancel()
    call("result", error)
    assert worker.answers == []
    assert call.peer.served == {}


def test_a_creation_becomes_a_value(worker: Any) -> None:
    call = new_call(worker, 0)
    owned = worker.owned
    assert call.begins(5, math.inf, 0.0)
    assert worker.unfinished == {call}
    call("result", None)
    assert owned.value == "result"
    assert worker.unfinished == set()
    assert call.owned is None
    assert worker.answers == []


def test_a_creation_that_is_not_wanted_ends(worker: Any) -> None:
    call = new_call(worker, 0)
    worker.owned = None
    assert not call.begins(5, math.inf, 0.0)
    assert call.has_ended
    assert worker.unfinished == set()


def test_a_value_is_wanted_while_its_caller_lives_or_somebody_refers_to_it(worker: Any) -> None:
    call = new_call(worker, 0)
    assert call.begins(5, math.inf, 0.0)
    call.deadline_s = 1.0
    worker.is_referred_to = False
    assert not call.is_unwanted(math.inf)
    call.peer.lost = WorkerLost("lost")
    assert call.is_unwanted(math.inf)
    worker.is_referred_to = True
    assert not call.is_unwanted(math.inf)


def test_a_future_is_answered_with_what_it_comes_to(worker: Any) -> None:
    call, future = new_call(worker), torch.futures.Future[int]()
    settle(worker, 0, async_execution(function), future, call)  # type: ignore[arg-type]
    assert worker.answers == []
    future.set_result(3)
    assert worker.answers == [(7, 3)]


def test_what_should_have_been_a_future_is_an_error(worker: Any) -> None:
    settle(worker, 0, async_execution(function), 3, new_call(worker))  # type: ignore[arg-type]
    ((_, error),) = worker.answers
    assert isinstance(error, ConfigurationError)
    assert "returned a int" in str(error)


def wait_for(worker: Any, owned: OwnedValue) -> Call:
    call = new_call(worker)
    settle(worker, 0, function, WhenReady(owned, lambda value: (function, value + 1)), call)
    return call


def test_what_needs_a_value_goes_on_when_it_is_ready(worker: Any) -> None:
    ready, later, failed = OwnedValue(), OwnedValue(), OwnedValue()
    error = ValueError("not made")
    ready.resolve(1)
    for owned in (ready, later, failed):
        wait_for(worker, owned)
    assert worker.answers == [(7, 2)]
    later.resolve(2)
    failed.resolve(None, error)
    worker.run_tasks()
    assert worker.answers == [(7, 2), (7, 3), (7, error)]


def test_what_needs_a_value_waits_no_longer_than_its_caller(worker: Any) -> None:
    owned = OwnedValue()
    call = wait_for(worker, owned)
    call.cancel()
    worker.run_tasks()
    assert call.has_ended
    owned.resolve(1)
    assert worker.tasks == []
    assert worker.answers == []


def test_a_caller_that_gives_up_while_it_goes_on_is_noticed(worker: Any) -> None:
    owned = OwnedValue()
    call = wait_for(worker, owned)
    owned.resolve(1)
    call.cancel()
    worker.run_tasks()
    assert call.has_ended
    assert worker.answers == []
