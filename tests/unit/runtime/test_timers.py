from __future__ import annotations

import gc
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.descriptors import nothing_is_written
from torchweft.runtime.timers import Timers

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


def started(jobs: list[Callable[[float], float]]) -> Timers:
    made = Timers("test-clock")
    made.start(jobs)
    return made


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def timers(job: Job) -> Iterator[Timers]:
    clock = started([job])
    job.next_call()
    yield clock
    clock.close()


def test_jobs_are_called_once_at_the_start_and_no_more(timers: Timers, job: Job) -> None:
    with pytest.raises(queue.Empty):
        job.calls.get(timeout=0.02)


def test_a_wake_up_has_the_jobs_called_at_once(timers: Timers, job: Job) -> None:
    before_s = time.monotonic()
    timers.wake_by(before_s)
    assert job.next_call() >= before_s


def test_a_job_is_called_again_when_it_wants_to_be(timers: Timers, job: Job) -> None:
    job.due_s = due_s = time.monotonic() + 0.02
    timers.wake_by(due_s)
    assert job.next_call() < due_s
    while job.next_call() < due_s:
        job.due_s = due_s
    job.due_s = math.inf


def test_a_wake_up_for_later_than_the_next_look_wakes_nobody(timers: Timers, job: Job) -> None:
    timers.wake_by(math.inf)
    with pytest.raises(queue.Empty):
        job.calls.get(timeout=0.02)


def test_a_wake_up_while_the_jobs_are_called_is_not_lost() -> None:
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

    clock = started([first, second])
    assert has_looked.wait(LIMIT_S)
    calls.get(timeout=LIMIT_S)
    clock.wake_by(time.monotonic())
    may_return.set()
    # An idle thread runs its jobs once a second anyway.
    calls.get(timeout=0.5)
    clock.close()


def test_a_job_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()

    def fails(now_s: float) -> float:
        raise ValueError("broken")

    clock = started([fails, job])
    job.next_call()
    clock.wake_by(time.monotonic())
    job.next_call()
    clock.close()
    assert "a timer's job failed" in caplog.text


def test_nothing_is_written_to_a_descriptor_that_another_file_has_got_since() -> None:
    job = Job()
    clock = started([job])
    clock.close()
    with nothing_is_written():
        clock.wake_by(0.0)


def test_finalizers_of_many_threads_may_wake_it(timers: Timers, job: Job) -> None:
    class Wakes:
        def __del__(self) -> None:
            timers.wake_by(0.0)

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
