"""Shows the progress of long work while a block runs: with rich on a terminal, else as a log.

rich clears as many lines above the cursor as it has drawn, so it would clear text that reached the
terminal by another way. It takes ``sys.stdout`` and ``sys.stderr`` meanwhile; handlers of `logging`
that keep one of these streams are given rich's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from torchweft.columns import printable
from torchweft.errors import ConfigurationError
from torchweft.progress.work import Job, Loss, Straggler, Work, WorkerShare

if TYPE_CHECKING:
    from typing_extensions import Self

TERMINAL_INTERVAL_S = 0.25
LOG_INTERVAL_S = 10.0
LOOK_EVERY_S = 1.0
"""Longest interval between two checks for news: losses, and parts that fell behind."""
MOST_LISTED = 8
"""How many workers, parts, or news at a time, are told one by one; more are only counted."""
MOST_JOBS = 3


class Nouns(NamedTuple):
    """An application's words for a job and for a part of it, in the singular."""

    job: str = "job"
    part: str = "part"


class Row(NamedTuple):
    """A bar on a terminal, and the texts around it.

    Attributes:
        title: What is counted.
        steps: How far it is.
        total: How far it goes; None if that is unknown.
        done: The count in words.
        note: What else is known.
    """

    title: str
    steps: int
    total: int | None
    done: str
    note: str = ""


class Display:
    """Shows the progress of the work that is reported to it, while a ``with`` block runs.

    On a terminal, and in a notebook, with rich installed, bars are updated several times a second.
    They show the steps of the program's loop with rate, remaining time and figures, the parts of
    the running jobs, and how many of them each worker runs. Otherwise, plain lines are written at a
    bounded rate: one for each interval in which work was done. In both cases a line names each lost
    worker and each part that is *behind*: it has run for more than a second, and for three times as
    long as the median of the last parts of that name. A final line tells how much was done, and by
    which workers.

    A thread writes, also while the program waits; the thread has ended when the block is left.

    Attributes:
        work: Receives the events of jobs, from any thread.
        nouns: The words for a job and a part, which an application replaces in a subclass.

    Args:
        total: How many steps there will be, for the remaining time; None if that is unknown.
        label: A name for the steps, or for the work as a whole.
        out: The stream to write to; by default ``sys.stderr``.
        is_terminal: Whether ``out`` is a terminal with rows that can change; None to detect it.
        interval_s: Seconds between two updates (0.25 by default), or two lines of a log (10).

    Raises:
        ConfigurationError: ``total`` is negative, or ``interval_s`` not positive.
    """

    nouns = Nouns()

    def __init__(
        self,
        total: int | None = None,
        label: str = "",
        *,
        out: TextIO | None = None,
        is_terminal: bool | None = None,
        interval_s: float | None = None,
    ) -> None:
        if total is not None and total < 0:
            raise ConfigurationError(
                f"total is {total}: pass how many steps there will be, or None"
            )
        if interval_s is not None and not interval_s > 0:
            raise ConfigurationError(
                f"interval_s is {interval_s}: pass a number of seconds above 0"
            )
        self.work = Work(total, time.monotonic)
        self._label = label
        self._out = sys.stderr if out is None else out
        self._is_terminal = is_terminal
        self._interval_s = interval_s
        self._bars: Any = None
        self._streams: list[tuple[str, Any, Any]] = []
        self._logged: tuple[int, int, int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="weft-progress", daemon=True)

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        self.work.restart_clock()
        self._bars = _bars_on(self._out, self._is_terminal)
        if self._bars is not None:
            self._start_bars()
        try:
            self._thread.start()
        except BaseException:  # the thread could not be started, or Ctrl-C
            self._close_bars()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._stop.set()
        try:
            self._thread.join()
            self._tell_news()
        finally:  # a second Ctrl-C may interrupt the join
            self._close_bars()
        with self.work.lock:
            line = self._summary(time.monotonic() - self._begin, kind)
        self._print(line)

    def step(self, count: int = 1, /, **figures: object) -> None:
        """Reports completed steps of the program's loop. Thread-safe.

        Returns at once, except that it waits for the value of a tensor on a GPU.

        Args:
            count: How many steps are done.
            figures: Values to show, by name: numbers, scalar tensors or strings. A figure is shown
                until it gets another value.
        """
        self.work.step(count, **figures)

    @property
    def workers(self) -> dict[str, WorkerShare]:
        """The work that each worker has done for the reported jobs, by worker name; a copy."""
        with self.work.lock:
            return self.work.shares()

    def stragglers(self) -> tuple[Straggler, ...]:
        """Returns the parts that are behind at this moment, slowest first; does not block."""
        with self.work.lock:
            return self.work.stragglers()

    def _keep_up(self) -> None:
        is_live = self._bars is not None
        interval_s = self._interval_s or (TERMINAL_INTERVAL_S if is_live else LOG_INTERVAL_S)
        due = time.monotonic() + interval_s
        while not self._stop.wait(interval_s if is_live else min(interval_s, LOOK_EVERY_S)):
            self._tell_news()
            if is_live:
                self._draw()
            elif time.monotonic() >= due and self._log():
                due = time.monotonic() + interval_s

    def _print(self, line: str) -> None:
        """Prints a line that stays; above the bars, if there are any."""
        if self._bars is not None:
            with _no_failure(self._bars):
                self._bars.console.print(line)
            return
        encoding = getattr(self._out, "encoding", None) or "utf-8"  # A StringIO has none.
        # A missing, closed or lost stream must not fail the program.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._out.write(f"{line}\n".encode(encoding, "replace").decode(encoding))
            self._out.flush()

    def _tell_news(self) -> None:
        with self.work.lock:
            news = self.work.take_news()
        for each in news[:MOST_LISTED]:
            told = self._lost if isinstance(each, Loss) else self._behind
            self._print(printable(told(each)))  # type: ignore[arg-type]
        if len(news) > MOST_LISTED:
            self._print(f"and {len(news) - MOST_LISTED} more are lost or behind")

    # Bars of rich

    def _start_bars(self) -> None:
        bars = self._bars
        before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        with _no_failure(bars):
            bars.start()
            bars.console.show_cursor()  # rich hides it, and it would stay so after ``kill -9``.
        self._streams = [
            (name, stream, getattr(sys, name))
            for name, stream in before.items()
            if getattr(sys, name) is not stream
        ]
        for _, stream, proxy in self._streams:
            _move_handlers(stream, proxy)
        _shown.add(self)

    def _draw(self) -> None:
        with self.work.lock:
            rows = self.rows()
        for place, task in enumerate(self._bars.task_ids):
            if place < len(rows):
                row = rows[place]
                about = {"description": row.title, "done": row.done, "note": row.note}
                self._bars.update(task, total=row.total, completed=row.steps, **about)
            self._bars.update(task, visible=place < len(rows))
        with _no_failure(self._bars):
            self._bars.refresh()

    def _close_bars(self) -> None:
        bars = self._bars
        if bars is not None:
            for task in bars.task_ids:
                bars.update(task, visible=False)
            with _no_failure(bars):
                bars.stop()
            self.give_streams_back()
            self._bars = None

    def give_streams_back(self) -> None:
        """Has text reach the terminal directly; takes no lock of rich."""
        _shown.discard(self)
        for name, stream, proxy in self._streams:
            if getattr(sys, name) is proxy:
                setattr(sys, name, stream)
            _move_handlers(proxy, stream)

    # Words

    def rows(self) -> list[Row]:
        """Returns the row of the program's steps, or else of all jobs, and those of running jobs.

        The caller holds the lock of ``work``.
        """
        work, nouns, label = self.work, self.nouns, self._label
        if work.steps or work.total:
            total = "" if work.total is None else f"/{work.total}"
            figures = [f"{name} {figure}" for name, figure in work.figures.items()]
            note = "  ".join([*self._pace(), *figures])
            rows = [Row(label or "step", work.steps, work.total, f"{work.steps}{total}", note)]
        else:
            title = f"{label}: " if label else ""
            title += f"{nouns.job} {work.jobs_begun}"
            done = f"{_counted(work.parts_ended, nouns.part)} done"
            rows = [Row(title, work.parts_ended, None, done)]
        for job in work.jobs[:MOST_JOBS]:
            title = f"{_plural(nouns.part)} of {_short(job.name)}"
            ended = len(job.ended)
            rows.append(Row(title, ended, job.parts, f"{ended}/{job.parts}", _running(job)))
        if (more := len(work.jobs) - MOST_JOBS) > 0:
            rows[-1] = rows[-1]._replace(note=f"and {_counted(more, nouns.job)} more")
        return [row._replace(title=printable(row.title), note=printable(row.note)) for row in rows]

    def _pace(self) -> Iterator[str]:
        per_s, left_s = self.work.per_s, self.work.left_s
        if per_s:
            yield f"{per_s:.1f} steps/s" if per_s >= 1 else f"{1 / per_s:.1f} s a step"
        if left_s is not None:
            yield f"{timedelta(seconds=int(left_s))} left"

    def _log(self) -> bool:
        """Writes a line if work was done since the last line; returns whether it wrote one."""
        with self.work.lock:
            state = (self.work.steps, self.work.jobs_begun, self.work.parts_ended)
            first, *jobs = self.rows()
        is_new, self._logged = state != self._logged, state
        if is_new:
            told = [f"{each.title} {each.done}" for each in jobs]
            self._print("  ".join(filter(None, (f"{first.title} {first.done}", first.note, *told))))
        return is_new

    def _behind(self, late: Straggler) -> str:
        part = f"{self.nouns.part} {late.part} of {_short(late.name)}"
        times = f"for {late.seconds:.1f} s (median {late.median_s:.1f} s)"
        return f"{late.worker} is behind: {part} {times}"

    def _lost(self, loss: Loss) -> str:
        numbers = ", ".join(map(str, loss.parts[:MOST_LISTED]))
        if len(loss.parts) > MOST_LISTED:
            numbers += f" and {len(loss.parts) - MOST_LISTED} more"
        told = f"{loss.worker} was lost"
        if not loss.parts:
            return told
        if len(loss.parts) == 1:
            return f"{told}; {self.nouns.part} {numbers} runs again on another"
        return f"{told}; {_plural(self.nouns.part)} {numbers} run again on others"

    def _summary(self, seconds: float, error: type[BaseException] | None) -> str:
        """Returns the final line: how much was done, and by which workers."""
        work, nouns = self.work, self.nouns
        stopped = "" if error is None else f" stopped by {error.__name__}"
        told = [f"{self._done()} in {_duration(seconds)}"]
        if len(work.workers) > MOST_LISTED:
            lost = sum(share.is_lost for share in work.workers.values())
            told.append(f"{len(work.workers)} workers{f', {lost} lost' if lost else ''}")
        elif work.workers:
            told.append(", ".join(f"{name} {_share(each)}" for name, each in work.workers.items()))
        counts = (work.moves, "moved"), (work.reruns, "rerun")
        told += [f"{count} {what}" for count, what in counts if count]
        if work.jobs_failed:
            told.append(f"{_counted(work.jobs_failed, nouns.job)} failed")
        return printable(f"{self._label or _plural(nouns.job)}{stopped}: {'; '.join(told)}")

    def _done(self) -> str:
        work = self.work
        parts = _counted(work.parts_ended, self.nouns.part)
        if not work.steps and not work.total:
            return f"{_counted(work.jobs_begun, self.nouns.job)}, {parts}"
        done = _counted(work.steps, "step")
        if work.total is not None and work.steps != work.total:
            done = f"{work.steps:,} of {_counted(work.total, 'step')}"
        return f"{done}, {parts}" if work.jobs_begun or work.workers else done


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun if count == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("ch", "sh", "s", "x")) else "s")


def _short(name: str) -> str:
    """Returns the last part of a function's name, without the suffix that ``parallelize`` adds."""
    return name.rpartition(".")[2].partition("__parallelize_")[0]


def _running(job: Job) -> str:
    """Returns how many parts run on each worker; with too many workers, only how many are busy."""
    running = job.running_on()
    if len(running) > MOST_LISTED:
        busy = sum(1 for count in running.values() if count)
        return f"running: {sum(running.values())} on {busy} of {len(running)} workers"
    told = [f"{name} {'lost' if name in job.lost else count}" for name, count in running.items()]
    return f"running: {'  '.join(told)}" if told else ""


def _share(share: WorkerShare) -> str:
    notes = [_duration(share.busy_s)]
    if share.times_behind:
        notes.append(f"{share.times_behind} behind")
    if share.is_lost:
        notes.append("lost")
    return f"{share.parts:,} ({', '.join(notes)})"


# Terminals


def _bars_on(out: TextIO, is_terminal: bool | None) -> Any:
    """Returns bars of rich; None where rows cannot change, or where rich is not installed."""
    if is_terminal is False or (is_terminal is None and not can_change_rows(out)):
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column
    except ImportError:
        return None

    def text(field: str) -> TextColumn:
        column = Column(no_wrap=True, overflow="ellipsis")
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=column)

    # Lines that other code prints are passed on unchanged.
    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    in_notebook = not is_terminal and _is_notebook()
    console = Console(
        file=None if in_notebook else out,
        force_terminal=None if in_notebook else True,
        soft_wrap=True,
        **plain,
    )
    bars = Progress(
        text("description"),
        BarColumn(16),
        text("fields[done]"),
        text("fields[note]"),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=_is_on(sys.stdout, out),
        redirect_stderr=_is_on(sys.stderr, out),
    )
    for _ in range(1 + MOST_JOBS):
        bars.add_task("", total=None, visible=False, done="", note="")
    return bars


def can_change_rows(out: TextIO) -> bool:
    """Whether a stream is a terminal with rows that can change, and no other display uses it."""
    if _is_notebook():
        return out is sys.stderr
    return (
        hasattr(out, "isatty")
        and out.isatty()
        and os.environ.get("TERM") not in ("dumb", "unknown")
        and not hasattr(out, "rich_proxied_file")  # lines go above the other display's rows
    )


def _is_notebook() -> bool:
    """Whether this is the process of a notebook, in which rich needs ``ipywidgets``."""
    return "ipykernel" in sys.modules and "ipywidgets" in sys.modules


def _is_on(stream: TextIO | None, out: TextIO) -> bool:
    """Whether two streams write to the same terminal."""
    try:
        return stream is not None and os.ttyname(stream.fileno()) == os.ttyname(out.fileno())
    except (AttributeError, OSError, ValueError):  # no terminal, or no descriptor at all
        return False


@contextlib.contextmanager
def _no_failure(bars: Any) -> Iterator[None]:
    """Writes nothing any more on a terminal that was closed or lost: the program goes on."""
    try:
        yield
    except (OSError, ValueError):
        bars.console.quiet = True


def _move_handlers(old: TextIO, new: TextIO) -> None:
    """Redirects the handlers of `logging` that write to one stream to another stream."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new


_shown: weakref.WeakSet[Display] = weakref.WeakSet()


def _after_fork() -> None:
    """Restores the streams in a forked process, where a missing thread may hold a lock of rich."""
    for each in list(_shown):
        each.give_streams_back()


os.register_at_fork(after_in_child=_after_fork)
