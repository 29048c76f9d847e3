from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.reports import calling, gathering, report, thread
from torchweft.observe.rates import Blocked, blocked, rate
from torchweft.reports import FunctionCounts, Traffic

ONE_MS = "-80"  # 2 ** (-79.5 / 8) s is 1.02 ms


def counted(calls: int, errors: int = 0, direction: str = "out", **times: int) -> FunctionCounts:
    return FunctionCounts("f", direction, calls, errors, times or {ONE_MS: calls})


def test_rates_are_those_of_the_time_between_two_reports() -> None:
    before = report(
        "a",
        functions=(counted(10), counted(5, direction="in")),
        traffic=(Traffic("b", 100, 200, {"sent shm": 1000}),),
    )
    now = replace(
        before,
        clock_s=before.clock_s + 2.0,
        cpu_s=before.cpu_s + 1.0,
        functions=(counted(30), counted(11, direction="in")),
        traffic=(Traffic("b", 300, 800, {"sent shm": 3000, "received cma": 400}),),
    )
    found = rate(now, before)
    assert (found.cpu, found.out_per_s, found.in_per_s) == (0.5, 10.0, 3.0)
    assert (found.sent_per_s, found.received_per_s) == (1100.0, 500.0)
    assert found.p50_s == found.p99_s == pytest.approx(1e-3, rel=0.05)


def test_a_worker_that_has_left_takes_nothing_from_the_rate() -> None:
    traffic = (Traffic("b", 100, 200, {"sent shm": 1000}), Traffic("c", 10, 20, {}))
    before = report("a", traffic=traffic)
    now = replace(before, clock_s=before.clock_s + 2.0, traffic=(Traffic("c", 14, 26, {}),))
    found = rate(now, before)
    assert (found.sent_per_s, found.received_per_s) == (2.0, 3.0)


def test_another_process_of_the_name_has_no_earlier_report() -> None:
    before = report("a")
    identity = replace(before.identity, pid=2)
    now = replace(before, clock_s=before.clock_s + 1.0, identity=identity)
    assert math.isnan(rate(now, before).cpu)


def test_waits_are_told_by_the_worker_that_is_waited_for() -> None:
    threads = (
        thread("one", waits=(calling("a", 1, "b", 3.0), calling("a", 2, "c", 1.0))),
        thread("two", waits=(gathering("a", "b", age_s=5.0),)),
    )
    assert blocked(report("a", *threads)) == (Blocked("b", 5.0, 2), Blocked("c", 1.0, 1))
