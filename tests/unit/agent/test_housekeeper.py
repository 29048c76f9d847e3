from __future__ import annotations

import gc
import math
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from tests.descriptors import nothing_is_written
from torchweft.agent.housekeeper import Housekeeper

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


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def housekeeper(job: Job) -> Iterator[Housekeeper]:
    keeper = Housekeeper("test-clock", [job])
    job.next_call()
    yield keeper
    keeper.close()


def test_jobs_are_called_once_at_the_start_and_no_more(housekeeper: Housekeeper, job: Job) -> None:
    with pytest.raises(queue.Empty):
        job.calls.get(timeout=0.02)


def test_a_nudge_has_the_jobs_called_at_once(housekeeper: Housekeeper, job: Job) -> None:
    before_s = time.monotonic()
    housekeeper.nudge(before_s)
    assert job.next_call() >= before_s


def test_a_job_is_called_again_when_it_wants_to_be(housekeeper: Housekeeper, job: Job) -> None:
    job.due_s = due_s = time.monotonic() + 0.02
    housekeeper.nudge(due_s)
    assert job.next_call() < due_s
    while job.next_call() < due_s:
        job.due_s = due_s
    job.due_s = math.inf


def test_a_nudge_for_later_than_the_next_look_wakes_nobody(
    housekeeper: Housekeeper, job: Job
) -> None:
    housekeeper.nudge(math.inf)
    with pytest.raises(queue.Empty):
        job.calls.get(timeout=0.02)


def test_a_nudge_while_the_jobs_are_called_is_not_lost() -> None:
    """The job has looked already when it gets something to do."""
    may_return, has_looked = threading.Event(), threading.Event()
    calls: queue.SimpleQueue[float] = queue.SimpleQueue()

    def first(now_s: float) -> float:
        calls.put(now_s)
        return math.inf

    def second(now_s: float) -> float:
        has_looked.set()
        may_return.wait(LIMIT_S)
        return math.inf

    keeper = Housekeeper("test-clock", [first, second])
    assert has_looked.wait(LIMIT_S)
    calls.get(timeout=LIMIT_S)
    keeper.nudge(time.monotonic())
    may_return.set()
    # An idle housekeeper looks once a second anyway.
    calls.get(timeout=0.5)
    keeper.close()


def test_a_job_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()

    def fails(now_s: float) -> float:
        raise ValueError("broken")

    keeper = Housekeeper("test-clock", [fails, job])
    job.next_call()
    keeper.nudge(time.monotonic())
    job.next_call()
    keeper.close()
    assert "housekeeping failed" in caplog.text


def test_nothing_is_written_to_a_descriptor_that_another_file_has_got_since() -> None:
    job = Job()
    keeper = Housekeeper("test-clock", [job])
    keeper.close()
    with nothing_is_written():
        keeper.nudge(0.0)


def test_finalizers_of_many_threads_may_nudge(housekeeper: Housekeeper, job: Job) -> None:
    class Nudges:
        def __del__(self) -> None:
            housekeeper.nudge(0.0)

    def make_and_drop() -> None:
        for _ in range(200):
            Nudges()

    threads = [threading.Thread(target=make_and_drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    job.next_call()
