"""Threads that wait note for what, and reports tell it while it lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.unit.engine.worker.group import LIMIT_S, wait_until
from tests.unit.rpc.pair import Pair, pair_of
from torchweft.engine.protocol.observing import CALL
from torchweft.engine.worker import current as current_agent
from torchweft.reports import Thread
from torchweft.rpc import api
from torchweft.rpc.calls import Future
from torchweft.rpc.reporter import threads

_may_end = threading.Event()


def halt() -> None:
    assert _may_end.wait(LIMIT_S)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of(4) as made:
        current_agent.install(None)
        current_agent.install(made.caller.agent)
        yield made


def shown_in(pair: Pair, name: str) -> Thread:
    (thread,) = [each for each in threads(pair.caller, with_frames=False) if each.name == name]
    return thread


WAYS: dict[str, Callable[[list[Future[Any]]], object]] = {
    "wait": lambda futures: [each.wait() for each in futures[:1]],
    "wait_all": torch.futures.wait_all,
    "as_completed": lambda futures: list(api.as_completed(futures)),
}


@pytest.mark.keeps("threads", "descriptors")
@pytest.mark.parametrize("way", WAYS)
def test_calls_are_shown_until_the_wait_for_them_ends(pair: Pair, way: str) -> None:
    _may_end.clear()
    futures = [pair.start(halt) for _ in range(2)]
    waiter = threading.Thread(target=WAYS[way], args=(futures,), name="waiter")
    waiter.start()
    try:
        wait_until(lambda: shown_in(pair, "waiter").waits, "its wait")
        thread = shown_in(pair, "waiter")
        assert {(wait.kind, wait.workers) for wait in thread.waits} == {(CALL, (pair.peer.name,))}
        assert len(thread.waits) == (1 if way == "wait" else 2)
        assert thread.needs_any is (way != "wait")
    finally:
        _may_end.set()
        waiter.join()
    assert pair.caller.agent.reactor.notes == {}


@pytest.mark.keeps("threads", "descriptors")
def test_a_note_goes_with_its_frame_and_tells_nothing_of_what_has_ended(pair: Pair) -> None:
    """Also where signal handlers raise before the block is left."""
    _may_end.clear()
    reactor = pair.caller.agent.reactor
    future = pair.start(halt)
    interrupted = reactor.waiting(future._call.unfinished)
    interrupted.__enter__()
    note = reactor.notes[threading.get_ident()]
    assert note() is interrupted
    assert interrupted.parts() == [future._call]
    _may_end.set()
    future.wait()
    assert interrupted.parts() == []
    assert reactor.notes == {threading.get_ident(): note}
    del interrupted
    assert note() is None
