"""Brings the progress of maps before somebody's eyes: lines that change, or lines of a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from torchweft.errors import ConfigurationError
from torchweft.mapreduce.display.activity import Activity, Loss, WorkerShare
from torchweft.mapreduce.display.steps import Steps
from torchweft.mapreduce.display.stragglers import Straggler
from torchweft.mapreduce.display.terminal import Terminal, is_terminal
from torchweft.mapreduce.display.wording import live_lines, log_line, news_line, summary
from torchweft.mapreduce.observers import observers

TERMINAL_INTERVAL_S = 0.25
LOG_INTERVAL_S = 10.0
LOOK_EVERY_S = 1.0
"""How often, at least, is looked for what a log says at once: losses, and parts that are behind."""


class progress:
    """Shows how this process's maps come along while a ``with`` block runs.

    On a terminal a few lines change several times a second: the steps of the program's loop with
    their rate, the time that is left and figures, the parts of the maps that run, how many of
    them each worker runs, and by name the workers that hold a map up: a part is *behind* if it
    has run for more than a second, and for three times as long as the median of the last parts of
    that function. A line about the loss of a worker stays. Elsewhere, in a log for instance, a
    line is written at times, and one for each loss and each part that fell behind. At the end a
    line says what was done, and by whom::

        with torchweft.mapreduce.progress(total=3000, label="meta-step") as shown:
            for step in range(3000):
                loss = meta_step()
                shown.step(loss=loss.item())

    What is printed meanwhile by ``print``, or otherwise through ``sys.stdout`` and ``sys.stderr``,
    appears above the lines that change. A thread draws them, also while the program waits for a
    map; it has ended when the block is left.

    Args:
        total: How many steps there will be, for the time that is left; None if nobody knows.
        label: What a step is called, or what the maps are for.
        out: Where to show it; by default ``sys.stderr``.
        is_terminal: Whether ``out`` is one that lines can change on; None to find out.
        interval_s: Seconds between two changes (0.25 by default), or two lines of a log (10).

    Raises:
        ConfigurationError: ``total`` is negative, or ``interval_s`` not positive.
    """

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
        self._label = label
        out = sys.stderr if out is None else out
        self._is_live = can_change_lines(out) if is_terminal is None else is_terminal
        usual_s = TERMINAL_INTERVAL_S if self._is_live else LOG_INTERVAL_S
        self._interval_s = usual_s if interval_s is None else interval_s
        self._terminal = Terminal(out)
        self._activity = Activity(time.monotonic)
        self._begin = self._log_due = time.monotonic()
        self._steps = Steps(total, self._begin)
        self._steps_lock = threading.Lock()
        self._logged: tuple[int, int, int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="weft-progress", daemon=True)

    def __enter__(self) -> progress:
        self._begin = time.monotonic()
        self._log_due = self._begin + self._interval_s
        with self._steps_lock:
            self._steps.begin(self._begin)
        observers.add(self._activity)
        if self._is_live:
            self._terminal.open()
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        observers.remove(self._activity)
        self._stop.set()
        try:
            self._thread.join()
            self._tell_news()
        finally:  # an impatient second Ctrl-C comes while the thread is waited for
            self._terminal.close()
        with self._steps_lock:
            seconds = time.monotonic() - self._begin
            line = summary(self._label, self._steps, self._activity.view(), seconds, error_type)
        self._terminal.print(line)

    def step(self, count: int = 1, /, **figures: object) -> None:
        """Says that a step of the program's loop is done; returns at once, from any thread.

        Args:
            count: How many steps are done, where that is not one.
            figures: What to show, by name: numbers, scalar tensors or texts. A figure is shown
                until another value comes for it. A tensor on a GPU is waited for.
        """
        with self._steps_lock:
            self._steps.add(count, figures, time.monotonic())

    @property
    def workers(self) -> dict[str, WorkerShare]:
        """What each worker has done for the maps that were seen, by name; a copy."""
        return self._activity.workers()

    def stragglers(self) -> tuple[Straggler, ...]:
        """Returns the parts that are behind at this moment, the slowest first; does not block."""
        return self._activity.stragglers()

    def _keep_up(self) -> None:
        pause_s = self._interval_s if self._is_live else min(self._interval_s, LOOK_EVERY_S)
        while not self._stop.wait(pause_s):
            self._update()

    def _update(self) -> None:
        self._tell_news()
        if self._is_live:
            self._draw()
        elif time.monotonic() >= self._log_due:
            self._log()

    def _tell_news(self) -> None:
        for news in self._activity.take_news():
            # On a terminal, who is behind is among the lines that change.
            if isinstance(news, Loss) or not self._is_live:
                self._terminal.print(news_line(news))

    def _draw(self) -> None:
        columns, rows = self._terminal.size()
        view = self._activity.view()
        with self._steps_lock:
            now = time.monotonic()
            lines = live_lines(self._label, self._steps, view, now, columns, rows)
        self._terminal.show(lines)

    def _log(self) -> None:
        view = self._activity.view()
        with self._steps_lock:
            now = time.monotonic()
            state = (self._steps.count, view.maps_begun, view.parts)
            line = log_line(self._label, self._steps, view, now)
        if state != self._logged:  # there is nothing to say about a program that waits
            self._logged = state
            self._log_due = now + self._interval_s
            self._terminal.print(line)


def can_change_lines(out: TextIO) -> bool:
    """Whether a stream is a terminal that understands how to move its cursor."""
    return is_terminal(out) and os.environ.get("TERM") != "dumb"
