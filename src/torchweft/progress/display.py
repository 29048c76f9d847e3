"""Shows long work while a block runs: on a terminal with rich, else as lines of a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from torchweft.errors import ConfigurationError
from torchweft.progress.wording import Nouns, Row, live_rows, log_line, news_lines, summary
from torchweft.progress.work import Loss, Straggler, Work, WorkerShare

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchweft.progress.live import LiveRows

TERMINAL_INTERVAL_S = 0.25
LOG_INTERVAL_S = 10.0
LOOK_EVERY_S = 1.0
"""How often a log is given news, at least: losses, and parts that are behind."""


class Display:
    """Shows the work that it is told about, while a ``with`` block runs.

    On a terminal, with rich installed, rows change several times a second: the steps of the
    program's loop with their rate, the time that is left and figures, the parts of the jobs that
    run, how many of them each worker runs, and by name the workers that delay a job. A part is
    *behind* if it has run for more than a second, and for three times as long as the median of the
    last parts of that name. A line about the loss of a worker stays. Elsewhere, plain lines are
    written at a bounded rate: one for each interval in which work was done, and a few a second
    about losses and parts that fell behind. At the end a line says how much was done, and by which
    workers.

    A thread writes, also while the program waits; it has ended when the block is left.

    Attributes:
        work: Is told the events of jobs; from any thread.
        nouns: The words for a job and a part, which an application replaces in a subclass.

    Args:
        total: How many steps there will be, for the time that is left; None if that is unknown.
        label: A name for the steps, or for the work as a whole.
        out: Where to show it; by default ``sys.stderr``.
        is_terminal: Whether ``out`` is one that rows can change on; None to find out.
        interval_s: Seconds between two changes (0.25 by default), or two lines of a log (10).

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
        self.work.steps.begin(self._begin)
        if self._wants_live:
            self._live = _live_rows_on(self._out)
        try:
            self._thread.start()
        except BaseException:  # no thread may be started, or Ctrl-C
            self._close_live()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        try:
            self._thread.join()
            self._tell_news()
        finally:  # an impatient second Ctrl-C comes while the thread is waited for
            self._close_live()
        seconds = time.monotonic() - self._begin
        with self.work.lock:
            line = summary(self._label, self.nouns, self.work, seconds, error_type)
        self._print(line)

    def step(self, count: int = 1, /, **figures: object) -> None:
        """Says that a step of the program's loop is done; returns at once, from any thread.

        Args:
            count: How many steps are done, where that is not one.
            figures: What to show, by name: numbers, scalar tensors or texts. A figure is shown
                until another value comes for it. A tensor on a GPU is waited for.
        """
        self.work.step(count, **figures)

    @property
    def workers(self) -> dict[str, WorkerShare]:
        """The work that each worker has done for the jobs that were seen, by name; a copy."""
        with self.work.lock:
            return self.work.shares()

    def stragglers(self) -> tuple[Straggler, ...]:
        """Returns the parts that are behind at this moment, the slowest first; does not block."""
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
            rows = live_rows(self._label, self.nouns, self.work)
        live.show([Row([self._encodable(text) for text in texts], warns) for texts, warns in rows])

    def _log(self) -> bool:
        """Writes a line unless nothing was done since the last one; returns whether it did."""
        with self.work.lock:
            state = (self.work.steps.count, self.work.jobs_begun, self.work.parts_ended)
            line = log_line(self._label, self.nouns, self.work)
        is_new, self._logged = state != self._logged, state
        if is_new:
            self._print(line)
        return is_new

    def _tell_news(self) -> None:
        with self.work.lock:
            news = self.work.take_news()
        if self._live is not None:  # there, stragglers are among the rows
            news = [each for each in news if isinstance(each, Loss)]
        for line in news_lines(news, self.nouns):
            self._print(line)

    def _print(self, line: str) -> None:
        line = self._encodable(line)
        if self._live is not None:
            self._live.print(line)
            return
        try:
            self._out.write(f"{line}\n")
            self._out.flush()
        except (OSError, ValueError):  # closed, or gone: no reason for a program to fail
            pass

    def _encodable(self, text: str) -> str:
        encoding = getattr(self._out, "encoding", None) or "utf-8"  # a StringIO has none
        return text.encode(encoding, "replace").decode(encoding)


def can_change_rows(out: TextIO) -> bool:
    """Whether a stream is a terminal on which rows can change, and no other display's do."""
    return (
        hasattr(out, "isatty")
        and out.isatty()
        and os.environ.get("TERM") not in ("dumb", "unknown")
        and not hasattr(out, "rich_proxied_file")  # lines go above the other display's rows
    )


def _live_rows_on(out: TextIO) -> LiveRows | None:
    """Returns rows that change on a terminal, or None where rich is not installed."""
    try:
        from torchweft.progress.live import LiveRows
    except ImportError:
        return None
    return LiveRows(out)
