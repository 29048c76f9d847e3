"""Tests maps whose calls are answered one by one, at the worst moments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.mapreduce.fake_calls import HEAVY, Map, Sent, lose
from torchweft.autograd.contexts import current_id, enter
from torchweft.errors import (
    CallCancelled,
    CallTimeout,
    NotInitialized,
)
from torchweft.mapreduce import execution, observers
from torchweft.mapreduce.schedule import Moved

LIMIT_S = 20.0
Begin = Callable[..., Map]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Begins a map with parts on the given workers."""

    def made(*args: Any, **how: Any) -> Map:
        one = Map(monkeypatch, *args, **how)
        one.begin()
        return one

    return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Makes a map that has not begun."""
    return lambda *args, **how: Map(monkeypatch, *args, **how)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has an object told of the events of maps, for the test."""
    return lambda observer: monkeypatch.setattr(observers, "watching", [observer])


@pytest.fixture
def recorded() -> Any:
    """Runs the test's maps within an autograd context."""
    with enter(77):
        yield


# Results


def test_results_come_in_the_order_of_the_parts(begin: Begin) -> None:
    one = begin([1, 2, 1])
    assert one.calls.numbers == [0, 1]
    one.calls.answer(1)
    one.calls.answer(0)
    assert one.outcomes == []
    one.calls.answer(2)
    assert one.results == [0, 10, 20]
    assert not one.execution.cancel(), "it is over"


def test_parts_have_what_time_is_left(monkeypatch: pytest.MonkeyPatch, begin: Begin) -> None:
    now_s = 100.0
    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=lambda: now_s))
    one = begin([1, 1, 1], timeout=5.0)
    now_s = 103.0
    one.calls.answer(0)
    now_s = 109.0
    one.calls.answer(1)
    assert [sent.timeout for sent in one.calls.sent] == [5.0, 2.0, 0.001]


# Concurrent threads


def test_an_answer_while_other_parts_are_being_sent(make: Begin) -> None:
    one = make([1, 2, 1])
    seen = []

    def on_send(sent: Sent) -> None:
        if sent.number == 1:
            one.calls.answer(0)
            seen.append(one.calls.numbers)

    one.calls.on_send = on_send
    one.begin()
    assert seen == [[0]], "one thing at a time"
    assert one.calls.numbers == [0, 1, 2]
    one.calls.answer_all()
    assert one.results == [0, 10, 20]


def test_an_answer_that_is_there_before_anybody_waits_for_it(make: Begin) -> None:
    one = make([1] * 2000)
    one.calls.on_send = lambda sent: sent.future.set_result(sent.number)
    one.begin()
    assert one.results == list(range(2000)), "and no recursion"


def test_answers_on_many_threads(begin: Begin) -> None:
    one = begin([number % 3 for number in range(100)], concurrency=5, balance=True)
    turn = threading.Lock()
    answered = 0

    def answer_some() -> None:
        nonlocal answered
        while True:
            with turn:
                if answered == 100:
                    return
                if answered == len(one.calls.sent):
                    continue  # Another thread is about to send more.
                sent = one.calls.sent[answered]
                answered += 1
            sent.future.set_result(sent.number)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(answer_some) for _ in range(4)]:
            future.result(LIMIT_S)
    assert one.results == list(range(100))


def test_what_follows_is_done_as_if_by_who_began_the_map(begin: Begin, recorded: Any) -> None:
    seen = []
    with torch.no_grad():
        one = begin([1, 1, 1], arguments=[(), (), (HEAVY,)])
    one.calls.on_send = lambda _: seen.append((current_id(), torch.is_grad_enabled()))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(one.calls.answer, 0).result(LIMIT_S)
        pool.submit(one.calls.answer, 1).result(LIMIT_S)
        pool.submit(one.tasks.run_all).result(LIMIT_S)
    assert seen == [(77, False)] * 2


# Slow work


def test_what_is_large_is_left_to_a_task(begin: Begin) -> None:
    one = begin([1, 1, 2, 2], arguments=[(HEAVY,)] * 4)
    assert one.calls.numbers == [0, 2], "who begins the map sends"
    one.calls.answer(0)
    one.calls.answer(2)
    assert one.calls.numbers == [0, 2], "who answers does not"
    assert len(one.tasks.tasks) == 1
    one.tasks.run_all()
    assert one.calls.numbers == [0, 2, 1, 3]
    one.calls.answer_all()
    assert one.results == [0, 10, 20, 30]


def test_an_answer_while_a_task_sends(begin: Begin) -> None:
    one = begin([1, 1, 2, 2], arguments=[(HEAVY,)] * 4)
    one.calls.answer(0)

    def on_send(sent: Sent) -> None:
        if sent.number == 1:
            one.calls.answer(2)
            assert one.calls.numbers == [0, 2]
            assert not one.tasks.tasks, "the one that sends goes on"

    one.calls.on_send = on_send
    one.tasks.run_all()
    assert one.calls.numbers == [0, 2, 1, 3]


def test_a_failure_does_not_wait_for_a_task_that_may_never_run(begin: Begin) -> None:
    one = begin([1, 1, 2], arguments=[(HEAVY,)] * 3)
    one.calls.answer(0)
    assert len(one.tasks.tasks) == 1
    one.calls.answer(2, KeyError("part 2"))
    assert isinstance(one.error, KeyError)
    one.tasks.run_all()
    assert one.calls.numbers == [0, 2], "nobody wants the rest"


def test_a_map_of_a_worker_that_has_shut_down_can_be_given_up(begin: Begin) -> None:
    one = begin([1, 1], arguments=[(HEAVY,)] * 2)
    one.calls.answer(0)
    one.is_worker = False
    assert one.execution.cancel()
    assert isinstance(one.error, NotInitialized)
    one.tasks.run_all()
    assert one.calls.numbers == [0]


# Cancelling


def test_cancelling_while_the_first_parts_are_sent(make: Begin) -> None:
    one = make([1, 2, 3])
    cancelled = []
    one.calls.on_send = lambda sent: cancelled.append(one.execution.cancel())
    one.begin()
    assert cancelled == [True]
    assert one.calls.numbers == [0], "the others are not sent any more"
    assert one.calls.last(0).future.was_cancelled
    assert isinstance(one.error, CallCancelled)


def test_who_is_interrupted_while_it_begins_leaves_nothing_behind(make: Begin) -> None:
    one = make([1, 2, 3])

    def on_send(sent: Sent) -> None:
        if sent.number == 1:
            raise KeyboardInterrupt

    one.calls.on_send = on_send
    with pytest.raises(KeyboardInterrupt):
        one.begin()
    assert one.calls.numbers == [0]
    assert one.calls.last(0).future.was_cancelled
    assert isinstance(one.error, CallCancelled)


# Errors


@pytest.mark.parametrize("fan_out", [1, 4])
def test_an_object_that_cannot_be_made_fails_the_parts_that_need_it(
    make: Begin, fan_out: int
) -> None:
    one = make([1, 2], has_object=True, fan_out=fan_out)

    def on_make(worker: int) -> None:
        if worker == 1:
            raise CallTimeout("no connection")

    one.calls.on_make = on_make
    one.begin()
    assert isinstance(one.error, CallTimeout)
    assert one.calls.numbers == []


def test_a_result_that_cannot_be_looked_into(begin: Begin, recorded: Any) -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    one = begin([1, 2])
    one.calls.answer(0, deep)
    assert isinstance(one.error, RecursionError)
    assert one.calls.last(1).future.was_cancelled


def test_an_action_that_raises_what_nobody_thought_of(
    monkeypatch: pytest.MonkeyPatch, begin: Begin
) -> None:
    def raise_error(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(execution._DO, Moved, raise_error)
    one = begin([1, 1, 1], [1, 2], balance=True)
    assert isinstance(one.error, ZeroDivisionError)
    assert all(sent.future.was_cancelled for sent in one.calls.sent)


@pytest.mark.parametrize("is_task", [False, True])
def test_a_part_whose_own_code_exits_while_it_is_sent(begin: Begin, is_task: bool) -> None:
    """The sending threads belong to the worker, so the map fails with the SystemExit."""
    one = begin([1, 1], arguments=[(HEAVY,)] * 2 if is_task else [])

    def on_send(sent: Sent) -> None:
        raise SystemExit("in __reduce__")

    one.calls.on_send = on_send
    one.calls.answer(0)
    one.tasks.run_all()
    assert isinstance(one.error, SystemExit)


@pytest.mark.parametrize("result", [None, KeyError("a part")])
def test_an_end_that_cannot_be_told(
    make: Begin, caplog: pytest.LogCaptureFixture, result: Any
) -> None:
    one = make([1])

    def done(*_: Any) -> None:
        raise ZeroDivisionError

    one.execution._on_done = done
    one.begin()
    one.calls.answer(0, result)
    (record,) = caplog.records
    assert "the end of a map of function could not be announced" in record.getMessage()


# Losses


def test_the_answer_of_an_old_attempt_is_dropped(begin: Begin) -> None:
    one = begin([1, 2])
    old = one.calls.sent[0].future
    old.cancel = lambda: False  # type: ignore[method-assign]  # The answer is on its way.
    lose(one.peers[1])
    one.calls.answer(1)
    old.set_result("old")
    assert one.outcomes == []
    one.calls.answer(0)
    assert one.results == [0, 10]


# Observers


class Watching:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda map_id, *given: self.events.append((name, *given))


def test_who_watches_is_told_in_order(make: Begin, watch: Callable[[Any], None]) -> None:
    watching = Watching()
    watch(watching)
    one = make([1, 1, 2], balance=True)
    one.begin()
    one.calls.answer(2)
    lose(one.peers[1])
    one.calls.answer(1)
    one.calls.answer(0)
    told = [event[:3] if event[0] == "ended" else event for event in watching.events]
    assert told == [
        ("begun", "function", 3, ["worker1", "worker2"]),
        ("started", 0, "worker1"),
        ("started", 2, "worker2"),
        ("ended", 2, "worker2"),
        ("moved", 1, "worker1", "worker2"),
        ("started", 1, "worker2"),
        ("ended", 1, "worker2"),
        ("lost", "worker1", (0,)),
        ("started", 0, "worker2"),
        ("ended", 0, "worker2"),
        ("done", None),
    ]


class Failing:
    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError


def test_an_observer_that_raises_does_not_harm_the_map(
    make: Begin, watch: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    watch(Failing())
    one = make([1, 1])
    one.begin()
    one.calls.answer_all()
    assert one.results == [0, 10]
    assert caplog.records
