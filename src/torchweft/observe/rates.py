"""Rates of workers: what two reports of each, taken some time apart, say about that time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchweft.reports import LENT, SHUTDOWN, FunctionCounts, Report, percentile, since, sum_of

IN, OUT = "in", "out"
NUMBERS = "memory_bytes in_flight serving queued owned held contexts passes".split()
"""The fields of a report that are shown as they are."""


@dataclass(frozen=True, slots=True)
class FunctionRate:
    """The calls of one function in the time between two reports.

    Attributes:
        function: Its name.
        direction: ``"out"`` for calls that were made, ``"in"`` for calls that were served.
        calls: How many have ended since they are counted.
        errors: How many of them with an error.
        calls_per_s: Calls that ended in a second; NaN if unknown.
        p50_s: Time that half of them did not exceed; NaN if there were none.
        p99_s: Time that 99 of 100 did not exceed; NaN if there were none.
    """

    function: str
    direction: str
    calls: int
    errors: int
    calls_per_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Blocked:
    """How long threads of a worker have waited for another worker, until now.

    Attributes:
        by: The other worker.
        seconds: The age of the oldest of these waits.
        threads: How many threads wait.
    """

    by: str
    seconds: float
    threads: int


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """One worker in the time between two reports.

    Attributes:
        report: The later report.
        cpu: Cores that its process used, on average; NaN if unknown, as are other rates.
        in_per_s: Calls that it answered in a second.
        out_per_s: Calls that it made and that ended in a second.
        p50_s: Time that half of the latter did not exceed.
        p99_s: Time that 99 of 100 of them did not exceed.
        sent_per_s: Bytes sent in a second, over all channels.
        received_per_s: Bytes received in a second.
        blocked: Which workers its threads wait for, the longest wait first.
    """

    report: Report
    cpu: float
    in_per_s: float
    out_per_s: float
    p50_s: float
    p99_s: float
    sent_per_s: float
    received_per_s: float
    blocked: tuple[Blocked, ...]

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self.report.worker

    def fields(self) -> dict[str, Any]:
        """Returns the rates, and what the report says as a number, for programs."""
        who = self.report.identity
        told = {"worker": who.worker, "rank": who.rank, "host": who.host, "pid": who.pid}
        told |= {name: getattr(self.report, name) for name in NUMBERS}
        rates = {name: getattr(self, name) for name in self.__slots__ if name != "report"}
        return told | rates | {"blocked": [asdict(each) for each in self.blocked]}


@dataclass(frozen=True, slots=True)
class PeerRate:
    """The bytes between a worker and another one over one channel, between two reports.

    Attributes:
        worker: The other worker.
        channel: ``"messages"`` for the connection that carries messages and small tensors,
            ``"lent"`` for memory that the other worker uses in place, or a channel of tensors.
        sent: Bytes sent since the two are connected.
        received: Bytes received.
        sent_per_s: Bytes sent in a second; NaN if unknown.
        received_per_s: Bytes received in a second; NaN if unknown.
    """

    worker: str
    channel: str
    sent: int
    received: int
    sent_per_s: float
    received_per_s: float


def rate(now: Report, before: Report | None) -> WorkerRate:
    """Returns the rates of one worker; ``before`` is an earlier report of the same process."""
    before = _same_process(now, before)
    over_s = _between(now, before)
    ins, outs = _grown(now, before, IN), _grown(now, before, OUT)
    # Bytes of a worker that has left are not in the later report.
    moved = [each for each in peers(now, before) if each.channel != LENT]
    times = sum_of(*(each.times for each in outs))
    return WorkerRate(
        report=now,
        cpu=_per(now.cpu_s - (before.cpu_s if before is not None else 0.0), over_s),
        in_per_s=_per(sum(each.calls for each in ins), over_s),
        out_per_s=_per(sum(each.calls for each in outs), over_s),
        p50_s=percentile(times, 0.5),
        p99_s=percentile(times, 0.99),
        sent_per_s=sum([each.sent_per_s for each in moved], _per(0.0, over_s)),
        received_per_s=sum([each.received_per_s for each in moved], _per(0.0, over_s)),
        blocked=blocked(now),
    )


def peers(now: Report, before: Report | None) -> list[PeerRate]:
    """Returns the bytes of a worker by other worker and channel, most of all bytes first."""
    before = _same_process(now, before)
    over_s = _between(now, before)
    earlier = before.moved() if before is not None else {}
    found = [
        PeerRate(
            *key,
            sent=sent,
            received=received,
            sent_per_s=_per(sent - earlier.get(key, (0, 0))[0], over_s),
            received_per_s=_per(received - earlier.get(key, (0, 0))[1], over_s),
        )
        for key, (sent, received) in now.moved().items()
    ]
    return sorted(found, key=lambda each: (-each.sent - each.received, each.worker, each.channel))


def functions(now: Iterable[Report], before: Mapping[str, Report]) -> list[FunctionRate]:
    """Returns the functions of several workers together, the most frequent first."""
    grown: dict[tuple[str, str], list[FunctionCounts]] = {}
    totals: dict[tuple[str, str], list[FunctionCounts]] = {}
    longest_s = 0.0
    for report in now:
        earlier = _same_process(report, before.get(report.worker))
        longest_s = max(longest_s, _between(report, earlier))
        for direction in (IN, OUT):
            for each in _grown(report, earlier, direction):
                grown.setdefault((each.function, direction), []).append(each)
        for each in report.functions:
            totals.setdefault((each.function, each.direction), []).append(each)
    found = []
    for key, counts in totals.items():
        recent = grown.get(key, [])
        times = sum_of(*(each.times for each in recent)) or sum_of(*(each.times for each in counts))
        found.append(
            FunctionRate(
                *key,
                calls=sum(each.calls for each in counts),
                errors=sum(each.errors for each in counts),
                calls_per_s=_per(sum(each.calls for each in recent), longest_s),
                p50_s=percentile(times, 0.5),
                p99_s=percentile(times, 0.99),
            )
        )
    return sorted(found, key=lambda each: (-each.calls, each.function, each.direction))


def blocked(report: Report) -> tuple[Blocked, ...]:
    """Returns for which workers the threads of a worker wait, the longest wait first."""
    ages: dict[str, list[float]] = {}
    for thread in report.threads:
        for wait in thread.waits:
            others = [each for each in wait.workers if each != report.worker]
            for other in others if wait.kind != SHUTDOWN else ():
                ages.setdefault(other, []).append(wait.age_s)
    found = [Blocked(other, max(each), len(each)) for other, each in ages.items()]
    return tuple(sorted(found, key=lambda each: (-each.seconds, each.by)))


def _same_process(now: Report, before: Report | None) -> Report | None:
    """Returns the earlier report, unless another process has the worker's name by now."""
    if before is None or before.identity.pid != now.identity.pid:
        return None
    return before if before.clock_s < now.clock_s else None


def _between(now: Report, before: Report | None) -> float:
    """Returns the seconds between two reports; 0 without an earlier one."""
    return now.clock_s - before.clock_s if before is not None else 0.0


def _grown(now: Report, before: Report | None, direction: str) -> list[FunctionCounts]:
    """Returns the calls that have ended since an earlier report."""
    earlier = {
        each.function: each
        for each in (before.functions if before is not None else now.functions)
        if each.direction == direction
    }
    nothing = FunctionCounts("", direction, 0, 0, {})
    found = []
    for each in now.functions:
        if each.direction == direction:
            past = earlier.get(each.function, nothing)
            calls, errors = each.calls - past.calls, each.errors - past.errors
            times = since(each.times, past.times)
            found.append(FunctionCounts(each.function, direction, calls, errors, times))
    return found


def _per(amount: float, over_s: float) -> float:
    return amount / over_s if over_s > 0 else math.nan
