"""Follows a set of workers from their start to their end: their output, and how they ended."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchweft.errors import LaunchError
from torchweft.launch.console import Console, Label, LineAssembler
from torchweft.launch.control import Ladder, Message
from torchweft.launch.nursery import WorkerSource
from torchweft.launch.report import ErrorTail, failure_report
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
    """Starts workers through a nursery and follows them until the last one is gone.

    ``poll`` does all the work, in the thread that calls it; ``stop`` may be called by any thread.

    Args:
        nursery: Forks the workers; no other code may read its events meanwhile.
        console: Where the workers' output goes.
        workers: The workers, in order of their ranks.
        on_exit: Called within ``poll`` when a worker has ended and its output has been written.
        on_start: Called within ``poll`` with name and process id of a worker that has started.
    """

    def __init__(
        self,
        nursery: WorkerSource,
        console: Console,
        workers: Sequence[WorkerSpec],
        on_exit: Callable[[WorkerExit], None],
        on_start: Callable[[str, int], None] = lambda name, pid: None,
    ) -> None:
        self._nursery = nursery
        self._console = console
        self._on_exit = on_exit
        self._on_start = on_start
        width = max(len(worker.name) for worker in workers)
        self._workers: dict[str, _Worker] = {}
        self._latest: dict[str, _Worker] = {}
        self._unstarted: deque[str] = deque()
        self._starting = 0
        self._running: set[str] = set()
        for index, spec in enumerate(workers):
            self._add(spec, Label(spec.name, index, width))
        self._shown = 0
        self._drain_until_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self.watch(nursery.fileno(), self._receive)

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
        """Whether every worker has ended and its output has been written."""
        if self._unstarted or self._running:
            return False
        is_late = self._drain_until_s is not None and time.monotonic() >= self._drain_until_s
        return is_late or not any(worker.streams for worker in self._workers.values())

    def watch(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Has ``poll`` call ``callback`` when ``descriptor`` is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def can_start(self) -> bool:
        """Whether workers can be started now; raises LaunchError if never again."""
        return self._nursery.is_ready()

    def start(self) -> None:
        """Requests the first workers; ``poll`` requests the others."""
        while self._unstarted and self._starting < STARTS_AT_ONCE:
            self._start_next()

    def start_again(self, worker: WorkerSpec) -> None:
        """Restarts a worker that has ended; ``pids`` and ``tail`` now describe its new life."""
        former = self._latest[worker.name]
        self._forget_drained()
        self._drain_until_s = None
        self._add(worker, former.label)
        self.start()

    def poll(self, timeout_s: float | None = None) -> None:
        """Waits for events, for at most ``timeout_s``, and handles them.

        Raises:
            LaunchError: The workers cannot be started, or the nursery is gone.
        """
        for event, _ in self._selector.select(self._wait_s(timeout_s)):
            event.data()
        self._show_partials()

    def stop(self, ladder: Ladder) -> None:
        """Signals all workers, one rung of the ladder after the other, until they have ended."""
        self._unstarted.clear()
        for key in list(self._running):
            self._nursery.stop(key, ladder)

    def signal(self, number: int, name: str | None = None) -> None:
        """Sends one signal to a worker, or to all, and not to the processes that they started."""
        keys = [key for key in self._running if name in (None, self._workers[key].spec.name)]
        self._nursery.signal(keys, number)

    def tail(self, name: str) -> str:
        """Returns the last lines that a worker wrote to standard error."""
        return self._latest[name].tail.text()

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
        self._selector.close()

    def _add(self, spec: WorkerSpec, label: Label) -> None:
        key = str(next(_keys))
        self._workers[key] = self._latest[spec.name] = _Worker(spec, label)
        self._unstarted.append(key)

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
        self._console.write_lines(stream.label, lines, is_error=stream.is_error)

    def _end_stream(self, worker: _Worker, name: str) -> None:
        stream = worker.streams.pop(name)
        self._write(worker, stream, stream.lines.finish())

    def _streams(self) -> list[_Stream]:
        return [each for worker in self._workers.values() for each in worker.streams.values()]

    def _wait_s(self, timeout_s: float | None) -> float | None:
        now_s = time.monotonic()
        deadlines = [self._drain_until_s, *(stream.show_at_s for stream in self._streams())]
        waits = [max(0.0, deadline - now_s) for deadline in deadlines if deadline is not None]
        return min(waits + ([] if timeout_s is None else [timeout_s]), default=None)

    def _show_partials(self) -> None:
        now_s = time.monotonic()
        for stream in self._streams():
            if stream.show_at_s is not None and now_s >= stream.show_at_s:
                stream.show_at_s = None
                self._console.show_partial(
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
            self._on_start(worker.spec.name, worker.pid)
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
        self._on_exit(
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
