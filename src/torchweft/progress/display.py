"""Shows the progress of long work while a block runs: with rich on a terminal, else as a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from torchweft.errors import ConfigurationError
from torchweft.progress.wording import Nouns, log_line, rows_of, summary, warnings_of
from torchweft.progress.work import Loss, Straggler, Work, WorkerShare

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchweft.progress.live import LiveRows

TERMINAL_INTERVAL_S = 0.25
LOG_INTERVAL_S = 10.0
LOOK_EVERY_S = 1.0
"""Longest interval between two checks for news to log: losses, and parts that fell behind."""


class Display:
    """Shows the progress of the work that is reported to it, while a ``with`` block runs.

    On a terminal, with rich installed, bars are updated several times a second. They show the steps
    of the program's loop with rate, remaining time and figures. They also show the parts of the
    running jobs, how many of them each worker runs, and the names of workers that delay a job. A
    part is *behind* if it has run for more than a second, and for three times as long as the median
    of the last parts of that name. A line about the loss of a worker stays. Otherwise, plain lines
    are written at a bounded rate: one for each interval in which work was done, and a few a second
    about losses and parts that fell behind. A final line tells how much was done, and by which
    workers.

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
        self._wants_live = can_change_rows(self._out) if is_terminal is None else is_terminal
        self._interval_s = interval_s
        self._live: LiveRows | None = None
        self._logged: tuple[int, int, int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="weft-progress", daemon=True)

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        self.work.restart_clock()
        if self._wants_live:
            self._live = _live_rows_on(self._out)
        try:
            self._thread.start()
        except BaseException:  # the thread could not be started, or Ctrl-C
            self._close_live()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._stop.set()
        try:
            self._thread.join()
            self._tell_news()
        finally:  # a second Ctrl-C may interrupt the join
            self._close_live()
        seconds = time.monotonic() - self._begin
        with self.work.lock:
            line = summary(self._label, self.nouns, self.work, seconds, kind)
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
        if self._live is not None:
            pause_s = interval_s = self._interval_s or TERMINAL_INTERVAL_S
        else:
            interval_s = self._interval_s or LOG_INTERVAL_S
            pause_s = min(interval_s, LOOK_EVERY_S)
        due = time.monotonic() + interval_s
        while not self._stop.wait(pause_s):
            self._tell_news()
            if self._live is not None:
                self._draw(self._live)
            elif time.monotonic() >= due and self._log():
                due = time.monotonic() + interval_s

    def _close_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def _draw(self, live: LiveRows) -> None:
        with self.work.lock:
            rows = rows_of(self._label, self.nouns, self.work)
            late = self.work.stragglers()
        live.show(rows, warnings_of([*late], self.nouns))

    def _log(self) -> bool:
        """Writes a line if work was done since the last line; returns whether it wrote one."""
        with self.work.lock:
            state = (self.work.steps, self.work.jobs_begun, self.work.parts_ended)
            line = log_line(self._label, self.nouns, self.work)
        is_new, self._logged = state != self._logged, state
        if is_new:
            self._print(line)
        return is_new

    def _tell_news(self) -> None:
        with self.work.lock:
            news = self.work.take_news()
        if self._live is not None:  # the rows show stragglers already
            news = [each for each in news if isinstance(each, Loss)]
        for line in warnings_of(news, self.nouns):
            self._print(line)

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.print(line)
            return
        encoding = getattr(self._out, "encoding", None) or "utf-8"  # A StringIO has none.
        line = line.encode(encoding, "replace").decode(encoding)
        try:
            self._out.write(f"{line}\n")
            self._out.flush()
        except (AttributeError, OSError, ValueError):  # a missing, closed or lost stream must
            # not fail the program
            pass


def can_change_rows(out: TextIO) -> bool:
    """Whether a stream is a terminal with rows that can change, and no other display uses it."""
    return (
        hasattr(out, "isatty")
        and out.isatty()
        and os.environ.get("TERM") not in ("dumb", "unknown")
        and not hasattr(out, "rich_proxied_file")  # lines go above the other display's rows
    )


def _live_rows_on(out: TextIO) -> LiveRows | None:
    """Returns rows that change on a terminal, or None if rich is not installed."""
    try:
        from torchweft.progress.live import LiveRows
    except ImportError:
        return None
    return LiveRows(out)
