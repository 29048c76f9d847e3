"""Follows a set of workers from their start to their end: their output, deaths and restarts."""

from __future__ import annotations

import contextlib
import itertools
import math
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torchweft.errors import LaunchError
from torchweft.launch.console import Label, LineAssembler
from torchweft.launch.control import Ladder, Message
from torchweft.launch.nursery import WorkerSource
from torchweft.launch.report import ErrorTail, Repeats, RunReport, failure_report
from torchweft.launch.restarts import Attempt, RestartPlan
from torchweft.launch.worker import WorkerExit, WorkerSpec

KILL_LADDER: Ladder = [(signal.SIGKILL, 0.5)]

STARTS_AT_ONCE = 8
"""Start requests that may be unanswered; more would fill the connection in both directions."""

QUIET_S = 0.2
"""Seconds after which an unfinished line is shown as it is."""

IN_VIEW_LINES = 10
"""Lines followed by at most this many later lines need not be shown again."""

DRAIN_LIMIT_S = 2.0
"""Seconds to wait for output from processes that outlive the worker that started them."""

LOOK_S = 0.2
"""Seconds between checks whether a lost host has been replaced."""

_keys = itertools.count()


@dataclass(eq=False)
class _Stream:
    """One output stream of a worker."""

    label: Label
    is_error: bool
    lines: LineAssembler = field(default_factory=LineAssembler)
    show_at_s: float | None = None


class _Worker:
    """One life of a worker; its streams are those that have not ended."""

    def __init__(self, spec: WorkerSpec, label: Label) -> None:
        self.spec = spec
        self.label = label
        self.tail = ErrorTail()
        self.streams: dict[str, _Stream] = {}
        self.pid = 0
        self.started_s = 0.0


class Supervisor:
    """Starts workers through a nursery, and follows them until none is left that may be restarted.

    ``turn`` does all the work, in the thread that calls it; ``stop`` may be called by any thread.

    Args:
        nursery: Forks the workers; no other code may read its events meanwhile.
        report: Tells of deaths and restarts, as its policy allows them, of the workers that it
            names by rank. Its console shows the output of the workers.
        spec: Returns what to start for a worker: called with its name and how often it has been
            restarted, before each of its lives.
        on_end: Called within ``turn`` when a worker has ended and its output has been written. It
            calls ``died`` if this was a death.
        before_group: Called before all workers of a group are restarted together.
    """

    def __init__(
        self,
        nursery: WorkerSource,
        report: RunReport,
        spec: Callable[[str, int], WorkerSpec],
        on_end: Callable[[WorkerExit], None],
        before_group: Callable[[], None] = lambda: None,
    ) -> None:
        self._nursery = nursery
        self._report = report
        self._spec = spec
        self._on_end = on_end
        self._before_group = before_group
        self._plan = RestartPlan(report.policy, report.names, time.monotonic())
        self._repeats = Repeats(self._plan.is_of_group)
        self._workers: dict[str, _Worker] = {}
        self._latest: dict[str, _Worker] = {}
        self._unstarted: deque[str] = deque()
        self._starting = 0
        self._running: set[str] = set()
        width = max(map(len, report.names))
        for index, name in enumerate(report.names):
            self._add(spec(name, 0), Label(name, index, width))
        self.has_repeated = False
        """Whether the last death was as the one before, at once."""
        self._shown = 0
        self._drain_until_s: float | None = None
        self.selector = selectors.DefaultSelector()
        """``turn`` calls ``data`` of what is readable."""
        self.selector.register(nursery, selectors.EVENT_READ, self._receive)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker name, of the workers that have been started."""
        return {name: worker.pid for name, worker in self._latest.items() if worker.pid}

    @property
    def running_count(self) -> int:
        """How many workers have been started, or are being started, and have not ended."""
        return len(self._running)

    @property
    def is_done(self) -> bool:
        """Whether every worker has ended, its output was written, and none is to be restarted."""
        return self._have_ended() and not self._plan.is_waiting

    @property
    def is_regrouping(self) -> bool:
        """Whether a worker has died, and the others have to end before all are restarted."""
        return self._plan.is_regrouping

    @property
    def restarts(self) -> int:
        """How many restarts there were; that of a group counts once."""
        return self._plan.total()

    def start(self) -> None:
        """Requests the first workers; ``turn`` requests the others."""
        while self._unstarted and self._starting < STARTS_AT_ONCE:
            self._start_next()

    def turn(self, limit_s: float = math.inf) -> None:
        """Waits for events, for at most ``limit_s``, handles them, and restarts who is due.

        Raises:
            LaunchError: The workers cannot be started, or the nursery is gone.
        """
        restart_s = self._plan.wait_s(time.monotonic())
        if restart_s is not None and not self._nursery.is_ready():
            restart_s = max(restart_s, LOOK_S)
        for event, _ in self.selector.select(self._wait_s(limit_s, restart_s)):
            event.data()
        self._show_partials()
        self._restart()

    def died(self, ended: WorkerExit) -> Attempt | None:
        """Reports a death; returns the restart that follows, or None if the run is over."""
        is_repeated = self._repeats.is_repeated(ended, self._latest[ended.name].tail.text())
        attempt = None if is_repeated else self._plan.died(ended.name, time.monotonic())
        self._report.died(ended, attempt, self.running_count, is_repeated=is_repeated)
        self.has_repeated = is_repeated
        return attempt

    def cancel_restarts(self) -> None:
        """Restarts none of the workers that have died so far."""
        self._plan.cancel()

    def stop(self, ladder: Ladder) -> None:
        """Signals all workers, one rung of the ladder after the other, until they have ended."""
        self._unstarted.clear()
        for key in list(self._running):
            self._nursery.stop(key, ladder)

    def signal(self, number: int, name: str | None = None) -> None:
        """Sends one signal to a worker, or to all, and not to the processes that they started."""
        keys = [key for key in self._running if name in (None, self._workers[key].spec.name)]
        self._nursery.signal(keys, number)

    def failure_report(self, ended: WorkerExit) -> str:
        """Returns the message about a failed worker; short if its last lines are still in view."""
        tail = self._latest[ended.name].tail
        is_in_view = self._shown - tail.shown_at <= IN_VIEW_LINES
        return failure_report(ended, tail.text(), is_in_view)

    def close(self) -> None:
        """Ends the following; later output is lost."""
        self._nursery.drop_output()
        for worker in self._workers.values():
            for name in list(worker.streams):
                with contextlib.suppress(BrokenPipeError, LaunchError):
                    self._end_stream(worker, name)
        self.selector.close()

    def _add(self, spec: WorkerSpec, label: Label) -> None:
        key = str(next(_keys))
        self._workers[key] = self._latest[spec.name] = _Worker(spec, label)
        self._unstarted.append(key)

    def _have_ended(self) -> bool:
        """Whether every worker has ended and its output has been written."""
        if self._unstarted or self._running:
            return False
        is_late = self._drain_until_s is not None and time.monotonic() >= self._drain_until_s
        return is_late or not any(worker.streams for worker in self._workers.values())

    def _restart(self) -> None:
        """Restarts the workers that are due, if their hosts are there."""
        if self._plan.is_regrouping and self._have_ended():
            attempt = self._plan.all_ended(time.monotonic())
            assert attempt is not None
            self._report.group_waits(attempt)
        if not (self._plan.is_waiting and self._nursery.is_ready()):
            return
        due = self._plan.take_due(time.monotonic())
        if due and self._plan.is_of_group:
            self._before_group()
        for name in due:
            self._forget_drained()
            self._drain_until_s = None
            self._add(self._spec(name, self._plan.count(name)), self._latest[name].label)
        self.start()

    def _forget_drained(self) -> None:
        """Drops former lives that can produce no more output."""
        for key, worker in list(self._workers.items()):
            if key not in self._running and key not in self._unstarted and not worker.streams:
                del self._workers[key]

    def _start_next(self) -> None:
        key = self._unstarted.popleft()
        worker = self._workers[key]
        worker.streams = {
            "out": _Stream(worker.label, is_error=False),
            "err": _Stream(worker.label, is_error=True),
        }
        self._running.add(key)
        self._starting += 1
        self._nursery.start(key, worker.spec)

    def _show(self, worker: _Worker, name: str, data: bytes) -> None:
        """Shows a piece of output; an empty piece is the end of its stream."""
        stream = worker.streams.get(name)
        if stream is None:
            return
        if not data:
            self._end_stream(worker, name)
            return
        self._write(worker, stream, stream.lines.feed(data))
        stream.show_at_s = time.monotonic() + QUIET_S if stream.lines.partial else None

    def _write(self, worker: _Worker, stream: _Stream, lines: list[bytes]) -> None:
        self._shown += len(lines)
        if stream.is_error and lines:
            worker.tail.extend(lines)
            worker.tail.shown_at = self._shown
        self._report.console.write_lines(stream.label, lines, is_error=stream.is_error)

    def _end_stream(self, worker: _Worker, name: str) -> None:
        stream = worker.streams.pop(name)
        self._write(worker, stream, stream.lines.finish())

    def _streams(self) -> list[_Stream]:
        return [each for worker in self._workers.values() for each in worker.streams.values()]

    def _wait_s(self, *limits_s: float | None) -> float | None:
        """Returns the time until the next action is due, or the least limit; None for no limit."""
        now_s = time.monotonic()
        deadlines = [self._drain_until_s, *(stream.show_at_s for stream in self._streams())]
        waits = [max(0.0, deadline - now_s) for deadline in deadlines if deadline is not None]
        least_s = min(waits + [limit for limit in limits_s if limit is not None], default=math.inf)
        return None if math.isinf(least_s) else least_s

    def _show_partials(self) -> None:
        now_s = time.monotonic()
        for stream in self._streams():
            if stream.show_at_s is not None and now_s >= stream.show_at_s:
                stream.show_at_s = None
                self._report.console.show_partial(
                    stream.label, stream.lines.partial, is_error=stream.is_error
                )

    def _receive(self) -> None:
        for event in self._nursery.receive():
            worker = self._workers.get(event.get("key", ""))
            if worker is not None:
                self._handle(event, worker)

    def _handle(self, event: Message, worker: _Worker) -> None:
        if event["event"] == "output":
            self._show(worker, event["stream"], event["data"])
        elif event["event"] == "started":
            worker.pid = event["pid"]
            worker.started_s = time.monotonic()
            self._starting -= 1
            self.start()
            self._report.started(worker.spec.name, worker.pid)
        elif event["event"] == "ended":
            self._worker_ended(event, worker)
        else:
            self._running.discard(event["key"])
            raise LaunchError(
                f"worker {worker.spec.name!r} cannot be started: {event['reason']}",
                worker=worker.spec.name,
            )

    def _worker_ended(self, event: Message, worker: _Worker) -> None:
        self._running.discard(event["key"])
        if not worker.pid:  # its host was lost before it had started
            self._starting -= 1
        now_s = time.monotonic()
        self._drain_until_s = None if self._running else now_s + DRAIN_LIMIT_S
        self._on_end(
            WorkerExit(
                worker.spec.name,
                worker.spec.rank,
                worker.pid,
                event["exit_code"],
                ended_at=time.time(),
                ran_s=now_s - worker.started_s if worker.pid else 0.0,
                is_memory_kill=event.get("is_memory_kill"),
                loss=event.get("loss", ""),
            )
        )
