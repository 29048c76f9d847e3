from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.thread_limits import no_new_threads
from torchweft.errors import CallRefused
from torchweft.rpc.coroutines import CoroutineRunner

LIMIT_S = 20.0


class Outcome(NamedTuple):
    result: Any
    error: BaseException | None


class Outcomes:
    """Collects the outcomes of coroutines."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def __call__(self, result: Any, error: BaseException | None) -> None:
        self._queue.put(Outcome(result, error))

    def next(self) -> Outcome:
        return self._queue.get(timeout=LIMIT_S)

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()


@pytest.fixture
def runner() -> Iterator[CoroutineRunner]:
    runner = CoroutineRunner("test-asyncio")
    yield runner
    runner.close(LIMIT_S)


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


def test_a_runner_that_gets_no_thread_tries_again_later(
    runner: CoroutineRunner, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def function() -> int:
        return 1

    with (
        no_new_threads(monkeypatch),
        pytest.raises(RuntimeError, match="can't start new thread"),
    ):
        runner.run(function(), 0, outcomes)
    runner.run(function(), 0, outcomes)
    assert outcomes.next() == Outcome(1, None)


def test_closing_cancels_what_still_runs(outcomes: Outcomes) -> None:
    runner = CoroutineRunner("test-asyncio")
    has_begun = threading.Event()

    async def function() -> None:
        has_begun.set()
        await asyncio.get_running_loop().create_future()

    runner.run(function(), 0, outcomes)
    assert has_begun.wait(LIMIT_S)
    runner.close(LIMIT_S)
    assert isinstance(outcomes.next().error, asyncio.CancelledError)
    runner.close(LIMIT_S)


def test_nothing_starts_after_the_end(outcomes: Outcomes) -> None:
    runner = CoroutineRunner("test-asyncio")
    runner.close(LIMIT_S)

    async def function() -> None:
        raise AssertionError("it runs")

    with pytest.raises(CallRefused):
        runner.run(function(), 0, outcomes)


def test_a_coroutine_that_blocks_the_thread_does_not_block_the_end(
    outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    runner = CoroutineRunner("test-asyncio")
    has_begun, may_end = threading.Event(), threading.Event()

    async def function() -> None:
        has_begun.set()
        may_end.wait(LIMIT_S)

    runner.run(function(), 0, outcomes)
    assert has_begun.wait(LIMIT_S)
    runner.close(0.01)
    assert "blocks thread 'test-asyncio'" in caplog.text
    may_end.set()
    assert outcomes.next() == Outcome(None, None)


def test_a_coroutine_that_is_cancelled_before_it_begins_never_does(
    runner: CoroutineRunner, outcomes: Outcomes
) -> None:
    is_blocked, may_go_on = threading.Event(), threading.Event()

    async def block_the_loop() -> None:
        is_blocked.set()
        may_go_on.wait(LIMIT_S)

    async def function() -> None:
        raise AssertionError("it runs")

    runner.run(block_the_loop(), 0, outcomes)
    assert is_blocked.wait(LIMIT_S)
    cancel = runner.run(function(), 0, outcomes)
    cancel()
    may_go_on.set()
    assert outcomes.next() == Outcome(None, None)
    assert isinstance(outcomes.next().error, asyncio.CancelledError)
    assert outcomes.is_empty
