from __future__ import annotations

import os
import queue
import time

import pytest

from benchmarks.frame import activities
from benchmarks.frame.work import Work, measure


def test_at_least_as_many_operations_as_asked_for() -> None:
    runs: list[int] = []
    measured = measure(Work(lambda: runs.append(1), operations=3), 7, [])
    assert len(runs) == len(measured["values"]) == 3


def test_a_run_may_count_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"ns": 0}
    counts = iter([4, 2])

    def run() -> int:
        now["ns"] += 8_000
        return next(counts)

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now["ns"])
    measured = measure(Work(run, operations=3, is_counted=True), 6, [])
    assert measured["values"] == pytest.approx([2e-6, 4e-6])


def test_preparation_is_neither_timed_nor_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"ns": 0, "cpu": 0.0}

    def takes(ns: int) -> None:
        now["ns"] += ns
        now["cpu"] += ns / 1e9

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now["ns"])
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now["cpu"])
    work = Work(lambda: takes(2_000), operations=2, prepare=lambda: takes(5_000))
    measured = measure(work, 4, [os.getpid()])
    assert measured["values"] == pytest.approx([1e-6, 1e-6])
    assert measured["cpu_s"] == pytest.approx(1e-6)


def test_activity_ends_with_the_next_order(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        if len(steps) == 3:
            orders.put("")

    monkeypatch.setitem(activities.ACTIVITIES, "python", lambda: step)
    activities.run_until_ordered("python", orders)
    assert len(steps) == 3


@pytest.mark.parametrize("name", activities.ACTIVITIES)
def test_activity_takes_a_moment_only(name: str) -> None:
    step = activities.ACTIVITIES[name]()
    step()
    begin = time.process_time()
    step()
    assert 0 < time.process_time() - begin < 1


def test_a_work_may_have_a_clock_of_its_own() -> None:
    now = {"ns": 0}

    def run() -> None:
        now["ns"] += 3_000

    for prepare in (None, lambda: None):
        work = Work(run, prepare=prepare, clock=lambda: now["ns"])
        assert measure(work, 2, [])["values"] == pytest.approx([3e-6, 3e-6])
