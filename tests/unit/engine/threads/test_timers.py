from __future__ import annotations

import gc
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.descriptors import nothing_is_written
from torchweft.engine.threads.timers import Timer, Timers

LIMIT_S = 20.0


class Job:
    """Records when it is called, and asks to be called again when the test says so."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.due_s = math.inf

    def __call__(self, now_s: float) -> float:
        self.calls.put(now_s)
        return self.due_s

    def next_call(self) -> float:
        return self.calls.get(timeout=LIMIT_S)


def started(*jobs: Callable[[float], float]) -> tuple[Timers, list[Timer]]:
    clock = Timers("test-clock")
    timers = [clock.add(job) for job in jobs]
    clock.start()
    return clock, timers


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def other() -> Job:
    return Job()


@pytest.fixture
def timer(job: Job, other: Job) -> Iterator[Timer]:
    clock, (timer, _) = started(job, other)
    job.next_call()
    other.next_call()
    yield timer
    clock.close()


def is_called(job: Job) -> bool:
    try:
        job.calls.get(timeout=0.02)
    except queue.Empty:
        return False
    return True


def test_a_wake_up_for_later_calls_the_job_then_and_not_before(timer: Timer, job: Job) -> None:
    due_s = time.monotonic() + 0.03
    timer.wake_by(due_s)
    assert job.next_call() >= due_s


def test_an_idle_job_is_called_once_a_second(timer: Timer, job: Job) -> None:
    assert job.next_call() > 0.0


def test_a_wake_up_for_later_than_the_next_look_wakes_nobody(timer: Timer, job: Job) -> None:
    timer.wake_by(math.inf)
    assert not is_called(job)


def test_a_wake_up_while_jobs_are_called_is_not_lost() -> None:
    """The first job gets work after it has run, while the second still runs."""
    may_return, has_looked = threading.Event(), threading.Event()
    calls: queue.SimpleQueue[float] = queue.SimpleQueue()

    def first(now_s: float) -> float:
        calls.put(now_s)
        return math.inf

    def second(now_s: float) -> float:
        has_looked.set()
        may_return.wait(LIMIT_S)
        return math.inf

    clock, (timer, _) = started(first, second)
    assert has_looked.wait(LIMIT_S)
    calls.get(timeout=LIMIT_S)
    timer.wake_by(time.monotonic())
    may_return.set()
    # An idle thread runs its jobs once a second anyway.
    calls.get(timeout=0.5)
    clock.close()


def test_a_wake_up_while_its_own_job_runs_is_not_lost() -> None:
    """The job has looked for work already, and is about to say that it has none."""
    may_return, has_looked = threading.Event(), threading.Event()
    calls: queue.SimpleQueue[float] = queue.SimpleQueue()

    def job(now_s: float) -> float:
        calls.put(now_s)
        has_looked.set()
        may_return.wait(LIMIT_S)
        return math.inf

    clock, (timer,) = started(job)
    assert has_looked.wait(LIMIT_S)
    calls.get(timeout=LIMIT_S)
    timer.wake_by(time.monotonic())
    may_return.set()
    calls.get(timeout=0.5)
    clock.close()


def test_a_job_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()

    def fails(now_s: float) -> float:
        raise ValueError("broken")

    clock, timers = started(fails, job)
    job.next_call()
    for timer in timers:
        timer.wake_by(time.monotonic())
    job.next_call()
    clock.close()
    assert "a timer's job failed" in caplog.text


def test_nothing_is_written_to_a_descriptor_that_another_file_has_got_since() -> None:
    job = Job()
    clock, (timer,) = started(job)
    clock.close()
    with nothing_is_written():
        timer.wake_by(0.0)


def test_finalizers_of_many_threads_may_wake_it(timer: Timer, job: Job) -> None:
    class Wakes:
        def __del__(self) -> None:
            timer.wake_by(0.0)

    def make_and_drop() -> None:
        for _ in range(200):
            Wakes()

    threads = [threading.Thread(target=make_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    job.next_call()


@pytest.mark.parametrize("answer", [math.nan, None])
def test_a_job_that_returns_no_number_is_called_again(
    answer: Any, other: Job, caplog: pytest.LogCaptureFixture
) -> None:
    calls: queue.SimpleQueue[float] = queue.SimpleQueue()

    def spoilt(now_s: float) -> Any:
        calls.put(now_s)
        return answer

    clock, _ = started(spoilt, other)
    for _ in range(2):  # At the start, and in a second at the latest.
        calls.get(timeout=LIMIT_S)
        other.next_call()
    clock.close()
