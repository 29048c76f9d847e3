from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.reports import made, member, report, served
from torchweft import observe
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotInitialized
from torchweft.observe.measures import BOUNDS_S, Distribution, measures_of
from torchweft.reports import FunctionCounts, NumberRow, NumberTable, bucket_of

OF_F = {"weft.worker": "a", "rpc.system.name": "torchweft", "rpc.method": "f"}


def found(*reports, absent=()):  # type: ignore[no-untyped-def]
    return {metric.name: metric for metric in measures_of(reports, absent, "cafe")}


def values(metric):  # type: ignore[no-untyped-def]
    return [(dict(point.attributes), point.value) for point in metric.points]


def test_calls_are_told_by_side_and_function() -> None:
    times = {str(bucket_of(time_s)): 1 for time_s in (1e-6, 0.01, 3.0, 500.0)}
    counts = (
        FunctionCounts("f", "out", 6, 1, times, 503.0),
        FunctionCounts("f", "in", 2, 0, {}, 0.0),
    )
    metrics = found(report("a", functions=counts))
    assert values(metrics["weft.rpc.client.calls"]) == [(OF_F, 6.0)]
    assert values(metrics["weft.rpc.client.errors"]) == [(OF_F, 1.0)]
    assert values(metrics["weft.rpc.server.calls"]) == [(OF_F, 2.0)]
    ((_, durations),) = values(metrics["rpc.client.call.duration"])
    assert (durations.count, durations.sum) == (4, 503.0)
    places = [place for place, count in enumerate(durations.counts) if count]
    assert [BOUNDS_S[place] if place < len(BOUNDS_S) else None for place in places] == [
        2.0**-16,
        2.0**-6,
        4.0,
        None,
    ]
    # No call of it had an answer: there is nothing to tell of its duration.
    assert "rpc.server.call.duration" not in metrics


def test_no_bucket_of_the_counters_lies_on_both_sides_of_a_limit() -> None:
    for limit_s in BOUNDS_S:
        for time_s in (limit_s * 0.9999, limit_s * 1.0001):
            counts = (FunctionCounts("f", "in", 1, 0, {str(bucket_of(time_s)): 1}, time_s),)
            metrics = found(report("a", functions=counts))
            ((_, durations),) = values(metrics["rpc.server.call.duration"])
            assert isinstance(durations, Distribution)
            below = sum(durations.counts[: BOUNDS_S.index(limit_s) + 1])
            assert below == (time_s <= limit_s), (limit_s, time_s)


def test_a_worker_tells_of_itself() -> None:
    numbers = (NumberTable("tables", ("of", "at"), (NumberRow(("x", "y"), {"rows": 3.0}, {}),)),)
    one = report(
        "a",
        made=(made("a", 1, "b"),),
        served=(served("b", 7), served("b", 8)),
        owned=3,
        held=4,
        numbers=numbers,
    )
    metrics = found(replace(one, cpu_s=2.5, queued=6))
    of_a = {"weft.worker": "a"}
    assert values(metrics["process.cpu.time"]) == [(of_a, 2.5)]
    assert values(metrics["weft.rpc.client.active"]) == [(of_a, 1.0)]
    assert values(metrics["weft.rpc.server.active"]) == [(of_a, 2.0)]
    assert values(metrics["weft.rpc.server.queued"]) == [(of_a, 6.0)]
    assert values(metrics["weft.references"]) == [
        ({**of_a, "weft.state": "owned"}, 3.0),
        ({**of_a, "weft.state": "held"}, 4.0),
    ]
    of_table = {"weft.component": "tables", "weft.of": "x y", "weft.number": "rows"}
    assert values(metrics["weft.component"]) == [({**of_a, **of_table}, 3.0)]


def test_a_worker_that_does_not_answer_is_down_in_the_same_series() -> None:
    up = values(found(report("a"), absent=[member("b", 1)])["weft.worker.up"])
    place = {"weft.group": "cafe", "host.name": "here"}
    assert up == [
        ({"weft.worker": "a", "weft.rank": "0", **place}, 1.0),
        ({"weft.worker": "b", "weft.rank": "1", **place}, 0.0),
    ]


# Mistakes in serving metrics, outside of a group

MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: observe.metrics.serve("9400"), ArgumentTypeError, "port"),  # type: ignore[arg-type]
    (lambda: observe.metrics.serve(70_000), ConfigurationError, "up to 65535"),
    (lambda: observe.metrics.serve(host=None), ArgumentTypeError, "host"),  # type: ignore[arg-type]
    (lambda: observe.metrics.serve(group=1), ArgumentTypeError, "all workers"),  # type: ignore[arg-type]
    (lambda: observe.metrics.read(timeout=0), ConfigurationError, "positive number of seconds"),
    (lambda: observe.metrics.read(timeout="2"), ArgumentTypeError, "timeout"),  # type: ignore[arg-type]
    (lambda: observe.metrics.read(), NotInitialized, "init_rpc"),
]


@pytest.mark.parametrize(("call", "kind", "told"), MISTAKES)
def test_a_mistake_is_told(call: Callable[[], object], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        call()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchweft.observe.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'torchweft\[metrics\]'"):
        observe.metrics.serve()
