"""Shows bars that change on a terminal, with rich; only a display on a terminal imports this.

rich clears as many lines above the cursor as it has drawn. It would clear text that reached the
terminal by another way. So ``sys.stdout``, ``sys.stderr`` and handlers of `logging` that write to
the same terminal go through rich while the bars are shown.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from torchweft.progress.wording import MOST_JOBS, Row, pace

_BAR_WIDTH = 16


class LiveRows:
    """Bars that change, below all other text that is printed on the terminal.

    Args:
        out: The terminal.
    """

    def __init__(self, out: TextIO) -> None:
        # Pass on lines that other code prints unchanged.
        self._console = Console(
            file=out,
            force_terminal=True,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )
        before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._bars = _Bars(
            _text("{task.description}"),
            BarColumn(_BAR_WIDTH),
            _text("{task.fields[done]}"),
            _Pace(table_column=Column(no_wrap=True)),
            _text("{task.fields[note]}"),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=_is_on(sys.stdout, out),
            redirect_stderr=_is_on(sys.stderr, out),
        )
        self._tasks = [
            self._bars.add_task("", total=None, visible=False, done="", note="", has_pace=not place)
            for place in range(1 + MOST_JOBS)
        ]
        self._try(self._bars.start)
        # rich hides the cursor, which would stay hidden after ``kill -9``.
        self._try(self._console.show_cursor)
        self._replaced = [
            (name, stream, getattr(sys, name))
            for name, stream in before.items()
            if getattr(sys, name) is not stream
        ]
        for _, stream, proxy in self._replaced:
            _move_handlers(stream, proxy)
        _shown.add(self)

    def show(self, rows: Sequence[Row], warnings: Sequence[str]) -> None:
        """Shows the bar of the steps and those of jobs, and lines below them."""
        for place, task in enumerate(self._tasks):
            self._bars.update(task, visible=place < len(rows))
        for task, row in zip(self._tasks, rows, strict=False):
            self._bars.update(
                task,
                total=row.total,
                completed=row.steps,
                description=row.title,
                done=row.done,
                note=row.note,
            )
        self._bars.warnings = warnings
        self._try(self._bars.refresh)

    def print(self, line: str) -> None:
        """Prints a line that stays, above the bars."""
        self._try(lambda: self._console.print(Text(line)))

    def close(self) -> None:
        """Removes the bars, and restores the streams."""
        _shown.discard(self)
        self.show((), ())
        self._try(self._bars.stop)
        self.give_streams_back()

    def give_streams_back(self) -> None:
        """Restores the streams, so that writes reach the terminal directly; takes no rich lock."""
        for name, stream, proxy in self._replaced:
            if getattr(sys, name) is proxy:
                setattr(sys, name, stream)
            _move_handlers(proxy, stream)

    def _try(self, draw: Callable[[], Any]) -> None:
        try:
            draw()
        except (OSError, ValueError):  # a closed or lost terminal must not fail the program
            self._console.quiet = True


class _Bars(Progress):
    """Bars with warnings below them."""

    warnings: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields what is drawn."""
        yield self.make_tasks_table(self.tasks)
        for line in self.warnings:
            yield Text(line, "yellow", no_wrap=True, overflow="ellipsis")


class _Pace(ProgressColumn):
    """The rate of the steps, and the remaining time."""

    def render(self, task: Task) -> Text:
        """Returns the text."""
        is_told = task.fields["has_pace"]
        return Text(pace(task.speed, task.time_remaining) if is_told else "")


def _text(template: str) -> TextColumn:
    column = Column(no_wrap=True, overflow="ellipsis")
    return TextColumn(template, markup=False, table_column=column)


def _is_on(stream: TextIO | None, out: TextIO) -> bool:
    """Whether two streams write to the same terminal."""
    try:
        return stream is not None and os.ttyname(stream.fileno()) == os.ttyname(out.fileno())
    except (AttributeError, OSError, ValueError):  # no terminal, or no descriptor at all
        return False


def _move_handlers(old: TextIO, new: TextIO) -> None:
    """Redirects the handlers of `logging` that write to one stream to another stream."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new


_shown: weakref.WeakSet[LiveRows] = weakref.WeakSet()


def _after_fork() -> None:
    """Restores the streams in a forked process, where a missing thread may hold a lock of rich."""
    for rows in _shown:
        rows.give_streams_back()


os.register_at_fork(after_in_child=_after_fork)
