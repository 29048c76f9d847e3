"""What the reports of workers say, as metrics with the names and units of OpenTelemetry. Pure.

Names of the semantic conventions are taken where there are any; others begin with ``weft.``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torchweft.reports import MESSAGES, STEPS, FunctionCounts, Identity, Member, Report

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

BOUNDS_S = tuple([2.0**exponent for exponent in range(-16, 8, 2)])
"""Upper limits of the buckets of durations, from 15 us to 64 s. Buckets of counters end at powers
of 2, so none of them has to be divided."""

_FIRST_BUCKETS = [exponent * STEPS for exponent in range(-16, 8, 2)]
_SYSTEM = "torchweft"


@dataclass(frozen=True, slots=True)
class Distribution:
    """How long calls took.

    Attributes:
        counts: How many calls were not longer than each of ``BOUNDS_S``, and than all of them;
            each is the number of its own bucket alone, so there is one more than limits.
        sum: Seconds of all calls together.
    """

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """How many calls there were."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric.

    Attributes:
        attributes: What it is of.
        value: A number, or the distribution of a histogram.
    """

    attributes: Mapping[str, str]
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of some workers.

    Attributes:
        name: Its name in OpenTelemetry.
        kind: ``"counter"``, which only grows while a worker lives, ``"gauge"`` or ``"histogram"``.
        unit: Its unit, by the Unified Code for Units of Measure: ``"s"``, ``"By"``, ``"{call}"``;
            empty for none.
        description: What it measures.
        points: Its values.
    """

    name: str
    kind: str
    unit: str
    description: str
    points: list[Point] = field(default_factory=list)


Value = Callable[[Report], float]

_OF_WORKER: tuple[tuple[str, str, str, str, Value], ...] = (
    ("process.cpu.time", COUNTER, "s", "processor time", lambda report: report.cpu_s),
    ("process.memory.usage", GAUGE, "By", "resident memory", lambda report: report.memory_bytes),
    ("weft.rpc.client.active", GAUGE, "{call}", "calls made that have not ended",
     lambda report: report.in_flight),
    ("weft.rpc.server.active", GAUGE, "{call}", "calls of others that have not ended",
     lambda report: report.serving),
    ("weft.rpc.server.slots", GAUGE, "{task}", "functions that run at a time, at most",
     lambda report: report.slots),
    ("weft.rpc.server.running", GAUGE, "{task}", "functions that run, without those that wait",
     lambda report: report.running),
    ("weft.rpc.server.queued", GAUGE, "{task}", "tasks that wait for a slot",
     lambda report: report.queued),
    ("weft.autograd.contexts", GAUGE, "{context}", "autograd contexts",
     lambda report: report.contexts),
    ("weft.autograd.passes", GAUGE, "{pass}", "backward passes under way",
     lambda report: report.passes),
)  # fmt: skip
_SIDES = (("client", "out", "made"), ("server", "in", "served"))
_ABOUT_DURATIONS = {
    "client": "from the request to the answer",
    "server": "from the arrival to the answer, queueing included",
}


def measures_of(
    reports: Iterable[Report], absent: Iterable[Member] = (), group: str = ""
) -> list[Metric]:
    """Returns the metrics that reports of workers contain.

    Args:
        reports: The reports, at most one for a worker.
        absent: The workers without a report.
        group: The name of their group.
    """
    found = list(reports)
    present = [
        Point(_of(report) | _place(report.identity, report.identity.group), 1.0) for report in found
    ]
    missing = [Point({"weft.worker": each.name} | _place(each, group), 0.0) for each in absent]
    about = "whether the worker answers"
    metrics = [Metric("weft.worker.up", GAUGE, "", about, [*present, *missing])]
    for name, kind, unit, description, value in _OF_WORKER:
        points = [Point(_of(report), float(value(report))) for report in found]
        metrics.append(Metric(name, kind, unit, description, points))
    metrics += [_references(found), _traffic(found)]
    for side, direction, verb in _SIDES:
        metrics += _functions(found, side, direction, verb)
    metrics.append(_components(found))
    return [metric for metric in metrics if metric.points]


def _of(report: Report, **others: str) -> dict[str, str]:
    return {"weft.worker": report.worker, **others}


def _place(worker: Identity | Member, group: str) -> dict[str, str]:
    return {"weft.group": group, "weft.rank": str(worker.rank), "host.name": worker.host}


def _references(reports: Iterable[Report]) -> Metric:
    points = [
        Point(_of(report) | {"weft.state": state}, float(count))
        for report in reports
        for state, count in (("owned", report.owned), ("held", report.held))
    ]
    about = "values that others may refer to, and references to values of others"
    return Metric("weft.references", GAUGE, "{reference}", about, points)


def _traffic(reports: Iterable[Report]) -> Metric:
    about = "bytes by other worker and channel; 'lent' is used in place, and does not move"
    metric = Metric("weft.network.io", COUNTER, "By", about)
    for report in reports:
        for (peer, channel), pair in report.moved().items():
            which = _of(report) | {"weft.peer": peer, "weft.channel": channel}
            for way, count in zip(("transmit", "receive"), pair, strict=True):
                if count or channel == MESSAGES:
                    of_way = which | {"network.io.direction": way}
                    metric.points.append(Point(of_way, float(count)))
    return metric


def _functions(reports: Iterable[Report], side: str, direction: str, verb: str) -> list[Metric]:
    calls = Metric(f"weft.rpc.{side}.calls", COUNTER, "{call}", f"calls {verb} that have ended")
    errors = Metric(
        f"weft.rpc.{side}.errors", COUNTER, "{call}", f"calls {verb} that ended with an error"
    )
    durations = Metric(f"rpc.{side}.call.duration", HISTOGRAM, "s", _ABOUT_DURATIONS[side])
    for report in reports:
        for each in report.functions:
            if each.direction != direction:
                continue
            which = _of(report) | {"rpc.system.name": _SYSTEM, "rpc.method": each.function}
            calls.points.append(Point(which, float(each.calls)))
            errors.points.append(Point(which, float(each.errors)))
            if each.times:
                durations.points.append(Point(which, _distribution(each)))
    return [calls, errors, durations]


def _distribution(counted: FunctionCounts) -> Distribution:
    counts = [0] * (len(BOUNDS_S) + 1)
    for bucket, count in counted.times.items():
        counts[bisect_right(_FIRST_BUCKETS, int(bucket))] += count
    return Distribution(tuple(counts), counted.seconds)


def _components(reports: Iterable[Report]) -> Metric:
    about = "numbers that parts of a worker tell of themselves, such as embedding tables"
    metric = Metric("weft.component", GAUGE, "", about)
    for report in reports:
        for table in report.numbers:
            for row in table.rows:
                which = {"weft.component": table.title, "weft.of": " ".join(row.labels)}
                for name, value in row.numbers.items():
                    of_number = _of(report) | which | {"weft.number": name}
                    metric.points.append(Point(of_number, float(value)))
    return metric
