"""Calls that wait for a value, and whose caller gives up meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import OwnedValue
from torchweft.rpc.serving import Call, WhenReady, settle


class Worker:
    """Stands in for a worker: records its answers and queues its tasks."""

    name = "callee"
    on_failure = carrier = None
    watchers = ()

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.unfinished: set[object] = set()
        self.serving: dict[int, object] = {}
        self.tasks: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Worker:
        """Serves as its own agent, info, me, references and reactor."""
        return self

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        self.answers.append((number, result))

    def reply_error(self, peer: Peer, number: int, error: BaseException) -> None:
        self.answers.append((number, error))

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


def wait_for(worker: Any, owned: OwnedValue) -> Call:
    call = new_call(worker)
    settle(worker, 0, function, WhenReady(owned, lambda value: (function, value + 1)), call)
    return call


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
