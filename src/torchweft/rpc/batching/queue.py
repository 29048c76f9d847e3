"""Gathers the calls of a batched function, runs them in batches, and counts what it has done."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from torchweft.errors import CallCancelled, ConfigurationError, QueueFull
from torchweft.protocol.batching import LAST, NOTHING, REFUSE, Batcher, Request
from torchweft.protocol.served_calls import SLOW_S, AnsweredCall
from torchweft.rpc.batching.running import Entry, Options, Outcome, Runner, Waiting
from torchweft.rpc.batching.stacking import Parts
from torchweft.rpc.worker import WORKER
from torchweft.serialize.registry import rebuilds_plain
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.threads.fair_queue import LAST as RUN_LAST
from torchweft.threads.fair_queue import OWN
from torchweft.threads.reports import log_exception
from torchweft.threads.timers import Timer
from torchweft.worker.agent import Agent, Slot


@rebuilds_plain
@dataclass(frozen=True)
class BatchStatistics:
    """What a batched function, or one object's batched method, has done so far.

    Attributes:
        batches: How many batches were closed.
        sizes: How many of them had each size.
        wait_s: Seconds that calls waited for their batch to be closed, all together.
        longest_wait_s: The longest of these times.
        waits: How many calls waited, by the time: by upper bounds in seconds, which exceed a call's
            time by less than a quarter.
        run_s: Seconds that the batches ran, all together.
        waiting: How many calls wait now.
        failed: Calls that ended with an error.
        refused: Calls that were refused because too many waited.
        left: Calls that left the queue because their callers no longer waited.
    """

    batches: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    waits: dict[float, int] = field(default_factory=dict)
    run_s: float = 0.0
    waiting: int = 0
    failed: int = 0
    refused: int = 0
    left: int = 0

    @property
    def calls(self) -> int:
        """How many calls were in these batches."""
        return sum(size * count for size, count in self.sizes.items())

    @property
    def mean_size(self) -> float:
        """How many calls a batch had on average; 0 before the first."""
        return self.calls / self.batches if self.batches else 0.0

    @property
    def mean_wait_s(self) -> float:
        """How long a call waited on average, in seconds; 0 before the first."""
        return self.wait_s / self.calls if self.batches else 0.0

    def size_percentile(self, percent: float) -> int:
        """Returns the size that so many percent of the batches do not exceed; 0 before the first.

        Raises:
            ConfigurationError: ``percent`` is not between 0 and 100.
        """
        return _percentile(self.sizes, percent) if self.sizes else 0

    def wait_percentile_s(self, percent: float) -> float:
        """Returns the time that so many percent of the calls waited at most, in seconds.

        It is too long by a quarter at most; 0 before the first batch.

        Raises:
            ConfigurationError: ``percent`` is not between 0 and 100.
        """
        found = _percentile(self.waits, percent) if self.waits else 0.0
        return min(found, self.longest_wait_s)


Number = TypeVar("Number", int, float)


def _percentile(counts: dict[Number, int], percent: float) -> Number:
    if not 0 <= percent <= 100:
        raise ConfigurationError(f"{percent} percent: pass a number from 0 to 100")
    needed = percent / 100 * sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= needed:
            break
    return value


_SORTED_AT: Final = 4096
"""Waits that are kept until they are counted, many at once."""


def _bound_s(key: int) -> float:
    """Returns the time at which a wait is counted: its binary exponent, and eighths of it."""
    return math.ldexp(key & 15, (key >> 4) - 3)


class Counts:
    """The statistics of a queue, while they grow; the queue keeps its threads apart."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._new_waits_s = array("d")
        self._waits: dict[int, int] = {}
        self._wait_s = self._longest_wait_s = self.run_s = 0.0
        self.failed = self.refused = self.left = 0

    def add_batch(self, waits_s: Sequence[float]) -> None:
        """Counts a batch by the times that its calls have waited. Hot path."""
        size = len(waits_s)
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self._new_waits_s.extend(waits_s)
        if len(self._new_waits_s) > _SORTED_AT:
            self._sort()

    def _sort(self) -> None:
        """Counts the waits since the last time by their bounds."""
        waits_s = np.frombuffer(self._new_waits_s)
        self._new_waits_s = array("d")
        mantissas, exponents = np.frexp(waits_s)
        keys = (exponents.astype(np.int64) << 4) + np.ceil(8 * mantissas).astype(np.int64)
        distinct, counts = np.unique(keys, return_counts=True)
        for key, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._waits[key] = self._waits.get(key, 0) + count
        self._wait_s += float(waits_s.sum())
        self._longest_wait_s = max(self._longest_wait_s, float(waits_s.max(initial=0.0)))

    def add_run(self, run_s: float, failed: int) -> None:
        """Counts the run of a batch."""
        self.run_s += run_s
        self.failed += failed

    def snapshot(self, waiting: int) -> BatchStatistics:
        """Returns the statistics so far."""
        self._sort()
        sizes = dict(self.sizes)
        waits: dict[float, int] = {}
        for key, count in self._waits.items():  # Of a bound there may be two keys.
            waits[_bound_s(key)] = waits.get(_bound_s(key), 0) + count
        return BatchStatistics(
            batches=sum(sizes.values()),
            sizes=sizes,
            wait_s=self._wait_s,
            longest_wait_s=self._longest_wait_s,
            waits=waits,
            run_s=self.run_s,
            waiting=waiting,
            failed=self.failed,
            refused=self.refused,
            left=self.left,
        )


_TRY_AGAIN_S = 1.0


class BatchQueue:
    """Gathers the calls of one function, or of one object's method, and runs them in batches.

    Args:
        function: Called with stacked arguments.
        name: Its name, for messages.
        options: The options of the decorator.
        agent: The worker's agent.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, options: Options, agent: Agent
    ) -> None:
        self._name = name
        self._limit = options.limit
        self._agent = agent
        self._worker = agent.slots[WORKER]
        self._runner = Runner(function, name, options, self._worker)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._entries: dict[Waiting, Entry] = {}
        self._batcher = Batcher(
            options.largest, options.smallest, options.longest_wait_s, options.limit
        )
        self._clock = agent.slots[_CLOCKS].of(agent)
        self._watched_s = math.inf
        """The time that the clock was told last."""
        self._is_slow = False
        self._runs_in = 0
        """The thread that runs a batch, or 0."""
        self._counts = Counts()

    # Arrival

    def put(self, call: AnsweredCall, bound: tuple[Any, ...], parts: Parts) -> None:
        """Adds a served call, which ends with its outcome later; refuses it if too many wait.

        Args:
            call: The call.
            bound: The object whose method is called, or nothing.
            parts: The other arguments.
        """
        with self._lock:
            request = self._add(call, bound, parts)
            self._counts.refused += request is REFUSE
        if request is REFUSE:
            call(None, self._full())
            return
        call.on_cancel(self._leave)
        self._carry_out(request)  # This thread looks at the tasks next.

    def put_or_wait(
        self, call: LocalCall, bound: tuple[Any, ...], parts: Parts, deadline_s: float
    ) -> bool:
        """Does as ``put`` for a thread of this worker, but waits for room; False if too late.

        Raises:
            ConfigurationError: The thread runs a batch of this queue.
        """
        if self._worker.carrier is not None:
            call.context = self._worker.carrier.context_here()
        if threading.get_ident() == self._runs_in:
            raise ConfigurationError(
                f"{self._name} is called within a batch of its own, and would wait for itself; "
                "move the common part to a function that is not batched"
            )
        with self._room:
            while self._batcher.is_full:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._room.wait(None if math.isinf(left_s) else left_s):
                    return False
            request = self._add(call, bound, parts)
        self._carry_out(request)
        self._agent.reactor.wake()
        return True

    def _add(self, call: Waiting, bound: tuple[Any, ...], parts: Parts) -> Request:
        now_s = time.monotonic()
        request = self._batcher.arrived(call, now_s)
        if request is not REFUSE:
            mark = device_streams.mark() if device_streams.HAS_CUDA else None
            self._entries[call] = Entry(call, bound, parts, now_s, mark)
        return request

    def _full(self) -> QueueFull:
        worker = self._agent.info.name
        return QueueFull(
            f"{self._limit} calls of {self._name} wait on worker {worker!r}, which refuses "
            "more; wait for some answers before the next call, or raise limit= of batched there",
            worker=worker,
            call=self._name,
        )

    def _leave(self, call: Waiting) -> None:
        """Takes a call out whose caller has given it up; does nothing to one that runs."""
        with self._lock:
            if not self._batcher.left(call):
                return
            entry = self._entries.pop(call)
            self._counts.left += 1
            self._room.notify()
        self._agent.reactor.submit(_end_left, entry)

    def expect(self, smallest: int) -> None:
        """Changes how many calls must wait for a batch to be closed before the longest wait."""
        with self._lock:
            request = self._batcher.expect(smallest, time.monotonic())
        if request is not NOTHING:
            self._carry_out(request)
            self._agent.reactor.wake()

    def statistics(self) -> BatchStatistics:
        """Returns what the queue has done so far."""
        with self._lock:
            return self._counts.snapshot(len(self._batcher))

    # Turns

    def _carry_out(self, request: Request) -> None:
        if request is not NOTHING:
            reactor = self._agent.reactor
            reactor.tasks.append((self._turn, None, None), RUN_LAST if request is LAST else OWN)
        wake_s = self._batcher.wake_s
        if wake_s != self._watched_s:
            self._watched_s = wake_s
            if wake_s != math.inf:
                self._clock.watch(self)

    @property
    def wake_s(self) -> float:
        """When to look at the clock; infinity for never."""
        return self._batcher.wake_s

    def woken(self, now_s: float) -> float:
        """Looks at the clock; returns when to look again."""
        with self._lock:
            request = NOTHING
            if now_s >= self._batcher.wake_s:
                request = self._batcher.woken(now_s)
            wake_s = self._batcher.wake_s
        if request is not NOTHING:
            self._agent.reactor.submit_task(self._turn)
        return wake_s

    def _turn(self, _: object, __: object) -> None:
        now_s = time.monotonic()
        with self._lock:
            batch = list(map(self._entries.pop, self._batcher.turn(now_s)))
            if batch:
                self._room.notify_all()
        if not batch:
            self._carry_out(NOTHING)  # Calls that left may have changed when to look at the clock.
            return
        self._runs_in = threading.get_ident()
        try:
            self._run_batch(batch, now_s)
        finally:
            self._runs_in = 0
            with self._lock:
                request = self._batcher.ended(time.monotonic())
            self._carry_out(request)

    def _run_batch(self, batch: list[Entry], now_s: float) -> None:
        entries = [entry for entry in batch if not entry.call.is_unwanted(now_s)]
        if len(entries) < len(batch):
            self._end_all_left(batch, entries)
        if not entries:
            return
        if self._is_slow:
            self._agent.reactor.arm_all()  # Others need not wait for this thread.
        self._counts.add_batch([now_s - entry.arrived_s for entry in entries])
        outcomes = self._runner.outcomes(entries)
        run_s = time.monotonic() - now_s
        self._is_slow = run_s > SLOW_S
        self._counts.add_run(run_s, sum(error is not None for _, error in outcomes))
        for entry, (result, error) in zip(entries, outcomes, strict=True):
            entry.call(result, error)

    def _end_all_left(self, batch: list[Entry], wanted: list[Entry]) -> None:
        """Ends the calls of a batch for whose results nobody waits."""
        numbers = set(map(id, wanted))
        left = [entry for entry in batch if id(entry) not in numbers]
        with self._lock:
            self._counts.left += len(left)
        for entry in left:
            _end_left(entry, None)


def _end_left(entry: Entry, _: object) -> None:
    entry.call(None, CallCancelled("the caller no longer waits for this call"))


class LocalCall:
    """A call by a thread of this worker, which waits for it."""

    def __init__(self, peer: Any, context_id: int) -> None:
        self.peer = peer
        self.context_id = context_id
        self.owned = self  # The result stays here.
        self.outcome: Outcome | None = None
        self.mark: Mark | None = None
        """The end of the GPU work that computes the result."""
        self.context: object = None
        """The context of the span in which it is made, while calls carry spans."""
        self._ended = threading.Event()
        self._is_given_up = False

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends the call with its outcome."""
        if device_streams.HAS_CUDA:
            self.mark = device_streams.mark()
        self.outcome = result, error
        self._ended.set()

    def wait(self, deadline_s: float) -> bool:
        """Waits for the outcome; gives the call up if it does not come in time."""
        left_s = deadline_s - time.monotonic()
        is_there = self._ended.wait(None if math.isinf(left_s) else max(left_s, 0.0))
        self._is_given_up = not is_there
        return is_there

    def is_unwanted(self, now_s: float) -> bool:
        """Whether its thread has given it up; noticed when the batch is closed."""
        return self._is_given_up


class _Clock:
    """Wakes the queues of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[BatchQueue, float] = {}
        self._timer: Timer | None = None

    def of(self, agent: Agent) -> _Clock:
        """Returns this clock, running by the timer thread of the agent."""
        with self._lock:
            if self._timer is None:
                self._timer = agent.timers.add(self._tick)
        return self

    def watch(self, queue: BatchQueue) -> None:
        """Has a queue woken when it is due."""
        assert self._timer is not None
        wake_s = queue.wake_s
        if self._queues.get(queue, math.inf) > wake_s:
            with self._lock:
                self._queues[queue] = wake_s
            self._timer.wake_by(wake_s)

    def _tick(self, now_s: float) -> float:
        with self._lock:
            due = [queue for queue, wake_s in self._queues.items() if wake_s <= now_s]
            for queue in due:
                del self._queues[queue]
        for queue in due:
            try:
                wake_s = queue.woken(now_s)
            except Exception:  # The other queues are woken nevertheless.
                log_exception("a queue of batched calls could not be woken; it is tried again")
                wake_s = now_s + _TRY_AGAIN_S
            if wake_s != math.inf:
                with self._lock:
                    self._queues[queue] = min(wake_s, self._queues.get(queue, math.inf))
        with self._lock:
            return min(self._queues.values(), default=math.inf)


_CLOCKS: Slot[_Clock] = Slot(_Clock)
