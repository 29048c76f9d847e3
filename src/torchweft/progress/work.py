"""Derives the state of long work from the events that an application reports.

A *job* is work that a caller waits for, such as a map or a batch of a pipeline. Its number is
unique in the process. It has *parts*, numbered from 0, and each part runs on a worker, known by its
name. No event reports a straggler, since a part that hangs cannot send an event. So stragglers are
detected by the time since their parts started.

A program's loop has *steps*, whose mean rate gives the remaining time.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torchweft.errors import CallCancelled

LEAST_S = 1.0
"""A part that has not run for longer than this is never behind."""

TIMES_THE_MEDIAN = 3.0
"""A part that runs for longer than this many medians is behind."""

_LEAST_S = 1e-9
REMEMBERED = 99
"""How many durations are kept for each name: the latest, since work may change."""


@dataclass
class WorkerShare:
    """The work that one worker did while the display was open.

    Attributes:
        parts: How many parts it completed.
        busy_s: Seconds that these parts took, measured by the caller: with both network transfers.
        times_behind: How many of its parts were stragglers.
        is_lost: Whether it was lost, and no result came from it since.
    """

    parts: int = 0
    busy_s: float = 0.0
    times_behind: int = 0
    is_lost: bool = False


@dataclass(frozen=True)
class Straggler:
    """A part that is behind.

    Attributes:
        worker: Name of the worker that runs it.
        part: Its place in the order of results.
        name: The name of its job; for a map, the name of its function.
        seconds: For how long it has run.
        median_s: The median duration of other parts of jobs of that name.
    """

    worker: str
    part: int
    name: str
    seconds: float
    median_s: float


class Loss(NamedTuple):
    """A worker was lost, and these parts of a job run again on the remaining workers."""

    worker: str
    parts: tuple[int, ...]


@dataclass
class Job:
    """The state of one job; ``running`` maps each running part to its worker and start time."""

    name: str
    parts: int
    workers: tuple[str, ...]
    lost_before: frozenset[str] = frozenset()
    lost: set[str] = field(default_factory=set)
    running: dict[int, tuple[str, float]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)

    def running_on(self) -> dict[str, int]:
        """Returns, for each worker of the job, how many parts run there."""
        counts = Counter(worker for worker, _ in self.running.values())
        return {worker: counts[worker] for worker in self.workers}


class Work:
    """All work since the display was opened; any thread may call the methods for events.

    Several threads report events, so a part may start after it has ended, and end after the loss
    of its worker. Events of jobs that began before are ignored. Hold ``lock`` to use the attributes
    and the methods that are not events.

    Args:
        total: How many steps the program's loop has, if that is known.
        clock: Returns the time in seconds.
    """

    def __init__(self, total: int | None, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.total = total
        self.steps = 0
        self.figures: dict[str, str] = {}
        self._began_s = clock()
        # Reentrant: a signal handler or a finalizer may report an event while its thread holds it.
        self.lock = threading.RLock()
        self.workers: dict[str, WorkerShare] = {}
        self.jobs_begun = self.jobs_failed = self.moves = self.reruns = 0
        self._jobs: dict[int, Job] = {}
        self._latest: list[Job] = []
        self._durations: dict[str, deque[float]] = {}
        self._news: list[Loss | Straggler] = []

    def step(self, count: int, **figures: object) -> None:
        """Event: steps of the program's loop are done, with figures to show."""
        texts = {name: readable_figure(value) for name, value in figures.items()}
        with self.lock:
            self.steps += count
            self.figures.update(texts)

    def begun(self, job_id: int, name: str, parts: int, workers: Sequence[str]) -> None:
        """Event: a job begins; jobs of one name do the same kind of work."""
        with self.lock:
            lost = frozenset(worker for worker in workers if self._share(worker).is_lost)
            job = self._jobs[job_id] = Job(name, parts, tuple(workers), lost)
            self._latest = [job]
            self.jobs_begun += 1

    def started(self, job_id: int, part: int, worker: str) -> None:
        """Event: a worker has begun a part."""
        with self.lock:
            job = self._jobs.get(job_id)
            if job is not None and part not in job.ended:
                job.running[part] = (worker, self.clock())

    def ended(self, job_id: int, part: int, worker: str, seconds: float) -> None:
        """Event: the result of a part has arrived, ``seconds`` after the part began."""
        with self.lock:
            job = self._jobs.get(job_id)
            if job is None or part in job.ended or worker in job.lost:
                return
            job.running.pop(part, None)
            job.ended.add(part)
            share = self._share(worker)
            share.parts += 1
            share.busy_s += seconds
            if worker in job.lost_before:
                share.is_lost = False  # a worker of that name has joined since
            self._judge(job, part, worker, seconds)
            self._durations.setdefault(job.name, deque(maxlen=REMEMBERED)).append(seconds)

    def moved(self, job_id: int, part: int, from_worker: str, to_worker: str) -> None:
        """Event: a part that waited for one worker will run on another."""
        with self.lock:
            self.moves += 1

    def lost(self, job_id: int, worker: str, parts: Sequence[int]) -> None:
        """Event: a worker was lost; these parts, also ended parts, run again on others."""
        with self.lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            for part in parts:
                job.running.pop(part, None)
            job.ended.difference_update(parts)
            job.behind.difference_update(parts)
            job.lost.add(worker)
            self.reruns += len(parts)
            share = self._share(worker)
            # Later jobs may report the same loss again, at each step of a long run.
            is_known = share.is_lost and (worker in job.lost_before or not parts)
            share.is_lost = True
            if not is_known:
                self._news.append(Loss(worker, tuple(parts)))

    def done(self, job_id: int, error: BaseException | None) -> None:
        """Event: a job has all its results, or has failed with ``error``."""
        with self.lock:
            job = self._jobs.pop(job_id, None)
            if job is not None:
                job.running.clear()  # after an error, parts that still run are of no interest
                self.jobs_failed += error is not None and not isinstance(error, CallCancelled)

    def restart_clock(self) -> None:
        """Sets the start of the first step: now."""
        self._began_s = self.clock()

    @property
    def per_s(self) -> float | None:
        """The mean steps per second; None before the first step."""
        return self.steps / max(self.clock() - self._began_s, _LEAST_S) if self.steps else None

    @property
    def left_s(self) -> float | None:
        """The remaining seconds; None if the rate or the total is unknown."""
        if not self.per_s or self.total is None:
            return None
        return max(0, self.total - self.steps) / self.per_s

    @property
    def jobs(self) -> list[Job]:
        """The running jobs, or else the job that began last."""
        return list(self._jobs.values()) or self._latest

    @property
    def parts_ended(self) -> int:
        """How many parts have ended, on all workers."""
        return sum(share.parts for share in self.workers.values())

    def shares(self) -> dict[str, WorkerShare]:
        """Returns a copy of the shares of all workers, by name."""
        return {name: replace(share) for name, share in self.workers.items()}

    def stragglers(self) -> tuple[Straggler, ...]:
        """Returns the parts that are behind now, slowest first."""
        now = self.clock()
        judged = (
            self._judge(job, part, worker, now - since)
            for job in self._jobs.values()
            for part, (worker, since) in job.running.items()
        )
        found = [straggler for straggler in judged if straggler is not None]
        return tuple(sorted(found, key=lambda straggler: -straggler.seconds))

    def take_news(self) -> list[Loss | Straggler]:
        """Returns the losses, and the parts that fell behind, since the last call; each once."""
        self.stragglers()
        news, self._news = self._news, []
        return news

    def _share(self, worker: str) -> WorkerShare:
        return self.workers.setdefault(worker, WorkerShare())

    def _judge(self, job: Job, part: int, worker: str, seconds: float) -> Straggler | None:
        """Returns the part as a straggler, or None; always None until a part of that name ended."""
        if seconds <= LEAST_S or job.name not in self._durations:
            return None
        median_s = statistics.median(self._durations[job.name])
        if seconds <= TIMES_THE_MEDIAN * median_s:
            return None
        straggler = Straggler(worker, part, job.name, seconds, median_s)
        if part not in job.behind:
            job.behind.add(part)
            self._share(worker).times_behind += 1
            self._news.append(straggler)
        return straggler


def readable_figure(value: object) -> str:
    """Formats a figure with four digits; also a scalar tensor."""
    if isinstance(value, int | str):
        return str(value)
    try:
        return format(value, ".4g")
    except (TypeError, ValueError):
        return str(value)
