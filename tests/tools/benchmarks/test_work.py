from __future__ import annotations

import os
import queue
import time

import pytest

from benchmarks.frame import activities
from benchmarks.frame.work import Work, measure


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
