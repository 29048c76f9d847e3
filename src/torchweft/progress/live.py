"""Shows rows that change on a terminal, with rich; only a display on a terminal imports this.

rich clears as many lines above the cursor as it has drawn. It would clear text that reached the
terminal by another way. So ``sys.stdout``, ``sys.stderr`` and handlers of `logging` that write to
the same terminal go through rich while the rows are shown.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, TextIO

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchweft.progress.wording import GAP, Row


class LiveRows:
    """Rows that change, below all other text that is printed on the terminal.

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
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=_is_on(sys.stdout, out),
            redirect_stderr=_is_on(sys.stderr, out),
        )
        self._try(self._live.start)
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

    def show(self, rows: list[Row]) -> None:
        """Shows these rows in place of the previous rows."""
        self._try(lambda: self._live.update(Group(*map(_drawn, rows)), refresh=True))

    def print(self, line: str) -> None:
        """Prints a line that stays, above the rows."""
        self._try(lambda: self._console.print(Text(line)))

    def close(self) -> None:
        """Removes the rows, and restores the streams."""
        _shown.discard(self)
        self._live.update("")
        self._try(self._live.stop)
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


def _drawn(row: Row) -> Columns:
    style = "yellow" if row.is_warning else ""
    texts = [Text(text, style, no_wrap=True, overflow="ellipsis") for text in row.texts]
    return Columns(texts, padding=(0, len(GAP)))


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
