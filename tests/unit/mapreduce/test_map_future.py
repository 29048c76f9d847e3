"""Tests how a thread or a task waits for a map, and that its future keeps nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from torchweft import extending
from torchweft.errors import CallCancelled
from torchweft.mapreduce import execution
from torchweft.mapreduce.execution import MapFuture

LIMIT_S = 20.0


class FakeExecution:
    """Ends its future when it is cancelled."""

    def __init__(self, future: MapFuture[Any]) -> None:
        self.future = future
        self.was_cancelled = threading.Event()

    def begin(self) -> None:
        pass

    def open_calls(self) -> list[Any]:
        return []

    def cancel(self) -> bool:
        self.was_cancelled.set()
        self.future.end(None, CallCancelled("given up"))
        return True


def make() -> tuple[MapFuture[Any], FakeExecution]:
    future: MapFuture[Any] = MapFuture()
    made: Any = FakeExecution(future)
    future.begin(made)
    return future, made


@pytest.fixture(autouse=True)
def _a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_LOOK_S", 0.001)
    monkeypatch.setattr(extending, "is_worker", lambda: True)


def test_each_wait_raises_a_copy_of_the_error() -> None:
    future, _ = make()
    error = KeyError("missing")
    future.end(None, error)
    caught = []
    for _ in range(2):
        with pytest.raises(KeyError, match="missing") as raised:
            future.wait()
        caught.append(raised.value)
    assert len({id(each) for each in (error, *caught)}) == 3


def test_a_thread_that_waits_does_not_wait_for_callbacks() -> None:
    future, _ = make()
    was_told = threading.Event()
    seen = []
    future.add_done_callback(lambda done: seen.append(was_told.wait(LIMIT_S)))

    def wait() -> int:
        result: int = future.wait()
        was_told.set()
        return result

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        future.end(5, None)
        assert waiting.result(LIMIT_S) == 5
    assert seen == [True]


def test_a_map_of_a_worker_that_has_shut_down_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    future, made = make()
    monkeypatch.setattr(extending, "is_worker", lambda: False)
    with pytest.raises(CallCancelled, match="given up"):
        future.wait()
    assert made.was_cancelled.is_set()


@pytest.mark.parametrize(
    "end", [lambda future: future.end(1, None), lambda future: future.end(None, KeyError())]
)
def test_a_map_that_has_ended_is_not_kept(end: Callable[[MapFuture[Any]], None]) -> None:
    future, made = make()
    end(future)
    assert not future.cancel()
    kept = weakref.ref(made)
    gc.disable()
    try:
        del made.future, made
        assert kept() is None, "no collector looks into futures"
    finally:
        gc.enable()
