"""Counts the calls of one worker, by function: how many, how many failed, how long they took.

A watcher notes the time at which a call ends: it is appended to a list, in one atomic step. The
timer thread sorts the times into histograms.
"""

from __future__ import annotations

import math
import threading
import time
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from torchweft import knobs
from torchweft.engine.codec.functions import describe, own_name
from torchweft.engine.protocol.calls import AnsweredCall
from torchweft.engine.worker.calls import PendingCall
from torchweft.ids import ReferenceId
from torchweft.reports import LEAST_S, STEPS, FunctionCounts
from torchweft.rpc.worker import Watcher, Worker

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


Key = int | bytes | str
"""Finds a function among those counted: its name, or the id of its code. It keeps no object of the
program alive but code, which has no captured values."""


def key_of(function: Any) -> Key:
    """Returns the key of a called function; quickly for plain functions and names."""
    kept = kept_of(function)
    return kept if isinstance(kept, (bytes, str)) else id(kept)


def kept_of(function: Any) -> object:
    """Returns what is kept of a function, so that its id is not used again."""
    kind = type(function)
    if kind is FunctionType:
        # All functions that one decorator wraps have the code of its wrapper.
        wrapped = getattr(function, "__wrapped__", None)
        return function.__code__ if wrapped is None else kept_of(wrapped)
    if kind is MethodType:
        return kept_of(function.__func__)
    if kind is BuiltinFunctionType and isinstance(function.__self__, (ModuleType, type)):
        return function
    return function if kind is bytes else name_of(function)


def name_of(function: Any) -> str:
    """Returns the name of a called function in reports."""
    if isinstance(function, bytes):
        return own_name(function.decode(errors="replace")) or "a function by value"
    if isinstance(function, tuple):  # A ``Subject``: its last part is the method.
        return f"{function[-1]} of a reference"
    return function if isinstance(function, str) else describe(function)


_MOST_KEPT_NAMES = 10_000


class Names:
    """The names of called functions; looked up once for each. Thread-safe.

    Attributes:
        by_key: The names of known functions: by the id of their code, or by the name that a
            message has.
    """

    def __init__(self) -> None:
        self.by_key: dict[Any, str] = {}
        self._kept: list[object] = []

    def name_of(self, function: Any) -> str:
        """Returns the name of a function."""
        key = key_of(function)
        name = self.by_key.get(key)
        if name is None:
            name = name_of(function)
            if len(self._kept) < _MOST_KEPT_NAMES and not isinstance(key, str):
                self._kept.append(kept_of(function))
                self.by_key[key] = name
        return name


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

    def note_made(self, call: PendingCall) -> None:
        """Notes a call of this worker that has its outcome."""
        taken_s = time.monotonic() - call.started_s
        function: Any = call.function
        try:  # A code object is found by its id, since its hash takes as long as the rest of this.
            entry = self.entries[id(function.__code__)]
        except (AttributeError, KeyError):
            entry = self.entry_of(function)
        (entry.failed if call.has_failed else entry.succeeded).append(taken_s)

    def note_served(self, call: AnsweredCall, *, failed: bool) -> None:
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

    def call_ends(self, call: PendingCall) -> None:
        """Counts a call that this worker has made."""
        self.made.note_made(call)

    def creation_sent(self, call: PendingCall, reference: ReferenceId) -> None:
        """Counts a call for whose answer nobody waits: it takes no time at the caller."""
        self.made.entry_of(call.function).untimed.append(0.0)

    def served(self, call: AnsweredCall, error: BaseException | None) -> None:
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
