"""Counts the calls of one worker, by function: how many, how many failed, how long they took.

A watcher notes the time at which a call ends: it is appended to a list, in one atomic step. The
timer thread sorts the times into histograms.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from torchweft import knobs
from torchweft.ids import ReferenceId
from torchweft.reports import LEAST_S, STEPS, FunctionCounts
from torchweft.rpc.watching import (
    IncomingCall,
    Key,
    OutgoingCall,
    Watcher,
    kept_of,
    key_of,
    name_of,
)
from torchweft.rpc.worker import Worker

LEASE_S = 10.0
"""Seconds for which calls are counted after a report."""
METRICS_LEASE_S = 600.0
"""The same after one for metrics, which are asked for less often."""
MOST_FUNCTIONS = 1000
OTHERS = "other functions"
"""Name under which the calls of further functions are counted."""

_COLLECT_S = 1.0


class _Times(NamedTuple):
    """The times of calls that have ended since they were last collected, in seconds.

    Attributes:
        succeeded: Of calls with a result.
        failed: Of calls with an error.
        untimed: Zeros, for calls whose end their caller does not learn.
    """

    succeeded: list[float]
    failed: list[float]
    untimed: list[float]


class Tally:
    """The calls in one direction. Thread-safe.

    Args:
        direction: ``"out"`` or ``"in"``.
    """

    def __init__(self, direction: str) -> None:
        self.direction = direction
        self.entries: dict[Key, _Times] = {}
        self._names: dict[Key, str] = {}
        self._kept: list[object] = []
        self._lock = threading.RLock()
        self._counted: dict[str, _Counted] = {}

    def entry_of(self, function: Any) -> _Times:
        """Returns the entry of a function, which is made if there is none yet."""
        return self.entries.get(key_of(function)) or self._add(function)

    def _add(self, function: Any) -> _Times:
        key, name = key_of(function), name_of(function)
        with self._lock:
            if len(self.entries) >= MOST_FUNCTIONS:
                key = name = OTHERS
            self._names[key] = name
            self._kept.append(kept_of(function) if key != OTHERS else None)
            return self.entries.setdefault(key, _Times([], [], []))

    def note_made(self, call: OutgoingCall) -> None:
        """Notes a call of this worker that has its outcome."""
        taken_s = time.monotonic() - call.started_s
        function: Any = call.function
        try:  # A code object is found by its id, since its hash takes as long as the rest of this.
            entry = self.entries[id(function.__code__)]
        except (AttributeError, KeyError):
            entry = self.entry_of(function)
        (entry.failed if call.has_failed else entry.succeeded).append(taken_s)

    def note_served(self, call: IncomingCall, *, failed: bool) -> None:
        """Notes a served call that was answered."""
        function: Any = call.function
        try:
            entry = self.entries[function]
        except (KeyError, TypeError):
            entry = self.entry_of(function)
        times = entry.failed if failed else entry.succeeded
        times.append(time.monotonic() - call.arrived_s)

    def collect(self) -> None:
        """Sorts the times noted so far into the histograms."""
        with self._lock:
            for key, entry in self.entries.items():
                name = self._names[key]
                counted = self._counted.setdefault(name, _Counted())
                failed = _take(entry.failed)
                counted.sort(failed)
                counted.errors += len(failed)
                counted.sort(_take(entry.succeeded))
                counted.untimed += len(_take(entry.untimed))

    def counts(self) -> list[FunctionCounts]:
        """Returns the calls counted so far, by function."""
        self.collect()
        with self._lock:
            return [
                FunctionCounts(
                    name,
                    self.direction,
                    sum(counted.times.values()) + counted.untimed,
                    counted.errors,
                    {str(number): count for number, count in counted.times.items()},
                    counted.seconds,
                )
                for name, counted in self._counted.items()
            ]


class _Counted:
    """The calls of one function that have been collected, by bucket of their times."""

    def __init__(self) -> None:
        self.times: dict[int, int] = {}
        self.seconds = 0.0
        self.errors = 0
        self.untimed = 0

    def sort(self, times: list[float]) -> None:
        """Adds calls."""
        seconds = np.maximum(np.array(times), LEAST_S)
        self.seconds += float(seconds.sum())
        numbers, counts = np.unique(np.floor(np.log2(seconds) * STEPS), return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.times[int(number)] = self.times.get(int(number), 0) + count


def _take(times: list[float]) -> list[float]:
    """Takes the times out of a list to which calls append: each step is a single C function."""
    taken = times[: len(times)]
    del times[: len(taken)]
    return taken


class Counting(Watcher):
    """Counts the calls of one worker while somebody wants to know.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        self._is_on = False
        self._until_s = -math.inf
        self._since_s = 0.0
        self.made, self.taken = Tally("out"), Tally("in")
        self._timer = worker.agent.timers.add(self.tick)
        if knobs.COUNTERS.get():
            self.extend(math.inf)

    @property
    def since_s(self) -> float:
        """Seconds since calls have been counted; negative if they are not."""
        return time.monotonic() - self._since_s if self._is_on else -1.0

    def extend(self, seconds: float = LEASE_S) -> None:
        """Counts calls from now on, for that time at least."""
        now_s = time.monotonic()
        with self._lock:
            self._until_s = max(self._until_s, now_s + seconds)
            if self._is_on:
                return
            self._is_on, self._since_s = True, now_s
            self._worker.watch(self)
        self._timer.wake_by(now_s + _COLLECT_S)

    def call_ends(self, call: OutgoingCall) -> None:
        """Counts a call that this worker has made."""
        self.made.note_made(call)

    def creation_sent(self, call: OutgoingCall, reference: ReferenceId) -> None:
        """Counts a call for whose answer nobody waits: it takes no time at the caller."""
        self.made.entry_of(call.function).untimed.append(0.0)

    def served(self, call: IncomingCall, error: BaseException | None) -> None:
        """Counts a served call."""
        self.taken.note_served(call, failed=error is not None)

    def counts(self) -> tuple[FunctionCounts, ...]:
        """Returns what was counted so far, of this time and earlier ones."""
        return (*self.made.counts(), *self.taken.counts())

    def tick(self, now_s: float) -> float:
        """Collects the times, and stops when nobody wants to know any more; a job of the timers."""
        with self._lock:
            if self._is_on and now_s > self._until_s:
                self._is_on = False
                self._worker.unwatch(self)
            is_on = self._is_on
        self.made.collect()
        self.taken.collect()
        return now_s + _COLLECT_S if is_on else math.inf
