from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

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
