"""Tests the state that results from events, in virtual time."""

from __future__ import annotations

import threading

import pytest

from torchweft.progress.work import (
    Work,
    WorkerShare,
)

WORKERS = ["worker0", "worker1"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def work(clock: Clock) -> Work:
    return Work(None, clock)


def run_part(work: Work, map_id: int, part: int, worker: str, seconds: float) -> None:
    work.started(map_id, part, worker)
    work.ended(map_id, part, worker, seconds)


def test_what_a_failed_map_left_behind_runs_no_more(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 2, WORKERS)
    run_part(work, 1, 0, "worker0", 0.1)
    work.started(1, 1, "worker1")
    work.done(1, ValueError("x"))
    clock.now = 9.0
    assert work.stragglers() == ()
    assert work.jobs[0].running_on() == {"worker0": 0, "worker1": 0}


def test_many_threads_at_once(work: Work) -> None:
    def run_map(map_id: int) -> None:
        work.begun(map_id, "inner", 50, WORKERS)
        for part in range(50):
            run_part(work, map_id, part, WORKERS[part % 2], 2.0)
            with work.lock:
                work.stragglers()
        work.done(map_id, None)

    threads = [threading.Thread(target=run_map, args=(map_id,)) for map_id in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert work.workers == {worker: WorkerShare(200, 400.0) for worker in WORKERS}
    assert work.jobs_begun == 8
