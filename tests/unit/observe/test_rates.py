from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.reports import calling, gathering, report, thread
from torchweft.observe.rates import Blocked, PeerRate, blocked, functions, peers, rate
from torchweft.reports import FunctionCounts, Traffic

ONE_MS = "-80"  # 2 ** (-79.5 / 8) s is 1.02 ms
ONE_S = "0"


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


def test_bytes_are_told_by_other_worker_and_channel() -> None:
    moved = {"sent shm": 1000, "received cma": 50, "lent": 7}
    before = report("a", traffic=(Traffic("b", 100, 200, moved),))
    later = {"sent shm": 3000, "received shm": 10, "received cma": 50, "lent": 7}
    traffic = (Traffic("b", 110, 260, later), Traffic("c", 1, 2, {}))
    now = replace(before, clock_s=before.clock_s + 2.0, traffic=traffic)
    found = {(each.worker, each.channel): each for each in peers(now, before)}
    assert list(found) == [("b", "shm"), ("b", "messages"), ("b", "cma"), ("b", "lent"),
                           ("c", "messages")]  # fmt: skip
    assert found["b", "shm"] == PeerRate("b", "shm", 3000, 10, 1000.0, 5.0)
    assert found["b", "messages"] == PeerRate("b", "messages", 110, 260, 5.0, 30.0)
    assert found["c", "messages"] == PeerRate("c", "messages", 1, 2, 0.5, 1.0)
    assert found["b", "lent"].sent == 7
    # Memory that is used in place does not move.
    assert rate(now, before).sent_per_s == (2000 + 10 + 1) / 2.0


def test_functions_of_all_workers_are_added() -> None:
    earlier = {name: report(name, functions=(counted(1),)) for name in "ab"}
    now = [
        replace(each, clock_s=each.clock_s + 1.0, functions=(counted(4, errors=1),))
        for each in earlier.values()
    ]
    (found,) = functions(now, earlier)
    assert (found.calls, found.errors, found.calls_per_s) == (8, 2, 6.0)
    (once,) = functions(now, {})
    assert math.isnan(once.calls_per_s)
    assert once.p50_s == pytest.approx(1e-3, rel=0.05)


def test_percentiles_forget_earlier_calls() -> None:
    before = report("a", functions=(counted(100, **{ONE_S: 100}),))
    times = {ONE_S: 100, ONE_MS: 10}
    now = replace(before, clock_s=101.0, functions=(counted(110, **times),))
    (found,) = functions([now], {"a": before})
    assert found.p99_s == pytest.approx(1e-3, rel=0.05)


def test_waits_are_told_by_the_worker_that_is_waited_for() -> None:
    threads = (
        thread("one", waits=(calling("a", 1, "b", 3.0), calling("a", 2, "c", 1.0))),
        thread("two", waits=(gathering("a", "b", age_s=5.0),)),
    )
    assert blocked(report("a", *threads)) == (Blocked("b", 5.0, 2), Blocked("c", 1.0, 1))
