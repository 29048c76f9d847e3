"""The counters of workers for other monitoring: served for Prometheus, or as plain data.

The numbers are those of ``torchweft top``: the reports of workers, asked when they are wanted, so
nothing is counted twice. They have the names and units of OpenTelemetry's semantic conventions
where there are any; other names begin with ``weft.``.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchweft import scraping
from torchweft.arguments import checked_int, wrong_type
from torchweft.closing import Closing
from torchweft.errors import ConfigurationError
from torchweft.observe.group import Group
from torchweft.observe.report import (
    MESSAGES,
    METRICS,
    STEPS,
    FunctionCounts,
    Identity,
    Member,
    Report,
)
from torchweft.observe.session import Access
from torchweft.rpc.node import Node, current_node
from torchweft.scraping import Address

__all__ = ["Distribution", "Metric", "Point", "Server", "read", "serve"]

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


# Reading and serving

_LOOPBACK = "127.0.0.1"
_MOST_PORTS = 1 << 16
TIMEOUT_S = 2.0
_POLL_S = 0.1


def read(*, group: bool = False, timeout: float = TIMEOUT_S) -> list[Metric]:
    """Returns the metrics of this worker, or of its group, as plain data.

    Calls of functions are counted from the first time on, and until ten minutes after the last
    one; ``WEFT_COUNTERS=1`` counts from the beginning. Thread-safe.

    Args:
        group: Whether to ask all workers of the group. They are asked as ``torchweft top`` does:
            no message of the group goes to them, and a worker that is stuck answers.
        timeout: Seconds to wait at most for each of them.

    Raises:
        NotInitialized: This process is no worker.
        ConfigurationError: ``timeout`` is not positive.
    """
    check(group, timeout)
    return reader_of(current_node(), group=group, timeout_s=timeout)()


def check(group: Any, timeout: Any) -> None:
    """Raises for arguments of ``read`` that make no sense."""
    if not isinstance(group, bool):
        raise wrong_type("group", group, "pass True for all workers, False for this one")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise wrong_type("timeout", timeout, "pass a number of seconds")
    if not 0 < timeout < math.inf:
        raise ConfigurationError(f"timeout is {timeout}; pass a positive number of seconds")


def reader_of(node: Node, *, group: bool, timeout_s: float) -> Callable[[], list[Metric]]:
    """Returns what reads the metrics of a worker, or of its group; its use blocks for the limit."""
    reporter = node.observed.reporter
    if not group:
        return lambda: measures_of([reporter.observed(METRICS)])
    access = Access(node.options.secret, node.options.tls)

    def read_all() -> list[Metric]:
        # Made anew: workers may have joined since the last time, or come back after a loss.
        found = Group([reporter.identity()], access)
        answers = found.ask(timeout_s, METRICS)
        absent = [each for each in found.members if each.name in answers.silent]
        return measures_of(answers.reports, absent, found.name)

    return read_all


def serve(
    port: int = 0, *, host: str = _LOOPBACK, group: bool = False, timeout: float = TIMEOUT_S
) -> Server:
    """Serves the metrics of this worker, or of its group, for Prometheus.

    They are read when they are asked for: see ``read``. The endpoint ends when it is closed, and
    with the worker. It needs the extra ``metrics``. Does not block.

    Args:
        port: The port; 0 for a free one.
        host: The address to listen at. Whoever reaches it reads names of functions and workers,
            and numbers; the connection is not encrypted.
        group: Whether to serve the metrics of all workers of the group.
        timeout: Seconds to wait at most for each worker of the group.

    Raises:
        ConfigurationError: The extra is missing, or the address cannot be listened at.
        NotInitialized: This process is no worker.
    """
    if not isinstance(host, str):
        raise wrong_type("host", host, "pass an address, such as '127.0.0.1'")
    if not 0 <= checked_int("port", port) < _MOST_PORTS:
        raise ConfigurationError(f"port is {port}; pass a number up to 65535, or 0 for a free one")
    check(group, timeout)
    scraping.check_package()
    node = current_node()
    server = Server(Address(host, port), "pass another port, or 0 for a free one")
    return server.serve(node, group=group, timeout_s=timeout)


class Server(Closing):
    """Serves the metrics of a worker at an address; also a context manager, which closes it.

    It listens at once, before the worker joins. Requests wait until ``serve`` is called.
    Thread-safe.

    Args:
        address: The address to listen at; with port 0, a free one.
        fix: What to do if it is taken, for the error.

    Raises:
        ConfigurationError: The extra is missing, or the address cannot be listened at.

    Attributes:
        url: Its address, for Prometheus.
        port: Its port.
    """

    def __init__(self, address: Address, fix: str = "take another port") -> None:
        try:
            from torchweft.observe.prometheus import HttpServer
        except ImportError as error:
            raise scraping.missing(error.name) from error
        try:
            self._http = HttpServer(address)
        except OSError as error:
            raise scraping.taken(address, error, fix) from error
        self.port: int = self._http.server_port
        self.url = address._replace(port=self.port).url
        self._node: Node | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def serve(self, node: Node, *, group: bool = False, timeout_s: float = TIMEOUT_S) -> Server:
        """Begins to serve the metrics of a worker, or of its group, until the worker leaves."""
        try:
            read = reader_of(node, group=group, timeout_s=timeout_s)
            read()  # Calls are counted from now on.
            self.begin(read, f"weft-{node.agent.info.name}-metrics")
        except BaseException:
            self.close()
            raise
        self._node = node
        node.on_end[self] = self.close
        return self

    def begin(self, read: Callable[[], list[Metric]], name: str) -> None:
        """Begins to serve what a function returns, by a thread of that name."""
        self._http.set_app(self._http.application_of(read))
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_POLL_S,), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it; nothing if it has ended. Blocks for half a second at most."""
        if self._node is not None:
            self._node.on_end.pop(self, None)
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._http.shutdown()
                thread.join()
            self._http.server_close()
            self._http.hang_up_on_all()

    def __repr__(self) -> str:
        return f"<metrics at {self.url}>"
