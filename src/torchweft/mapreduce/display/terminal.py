"""Keeps a few changing lines below everything else that is printed on a terminal.

The obvious way leaves the cursor at the end of these lines and goes back up to draw them anew;
whatever else is printed meanwhile, or a change of the terminal's width, then makes it go up to
the wrong place and wipe out what others wrote. So here the cursor always rests *above* them, on
an empty line: what follows is ours, and drawing begins where the cursor is. Wherever it ends up,
nothing of others' is ever wiped out, and no mode of the terminal has to be restored, not even
after ``kill -9``.

What is printed through ``sys.stdout`` and ``sys.stderr`` goes through here while the lines are
shown: they make room for it and come back below it, in the same write.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterable
from typing import Any, TextIO

CLEAR_BELOW = "\r\x1b[J"
CLEAR_REST_OF_LINE = "\x1b[K"


class Terminal:
    """Shows lines below what others print; may be used by several threads.

    Args:
        out: The terminal. As long as this is not opened, any text stream will do to print to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lines: list[str] = []
        self._is_open = False
        self._is_line_begun = False
        self._process = os.getpid()
        self._replaced: dict[str, TextIO] = {}
        # A signal handler or a finalizer may print while its thread draws.
        self._lock = threading.RLock()

    def open(self) -> None:
        """Has standard output and standard error, where they are terminals, go through here."""
        self._is_open = True
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                self._replaced[name] = stream
                setattr(sys, name, _Through(self, stream))

    def close(self) -> None:
        """Takes the lines away, and gives standard output and standard error back."""
        for name, stream in self._replaced.items():
            if getattr(getattr(sys, name), "stream", None) is stream:
                setattr(sys, name, stream)
        with self._lock:
            if self._is_line_begun:
                self._write("\n")
            elif self._lines:
                self._write(CLEAR_BELOW)
            self._is_open = self._is_line_begun = False
            self._lines = []

    def size(self) -> tuple[int, int]:
        """Returns columns and rows as they are now."""
        try:
            return os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):  # no terminal, or no descriptor at all
            return shutil.get_terminal_size()

    def show(self, lines: list[str]) -> None:
        """Shows these lines in place of the ones before."""
        with self._lock:
            # A line that somebody has begun to print, a prompt for instance, is not disturbed.
            if self._is_open and not self._is_line_begun:
                self._lines = lines
                self._write(self._picture())

    def print(self, text: str) -> None:
        """Prints a line that stays, above the ones that change."""
        with self._lock:
            start = "\n" if self._is_line_begun else CLEAR_BELOW if self._lines else ""
            self._is_line_begun = False
            self._write(f"{start}{text}\n{self._picture()}")

    def pass_on(self, stream: TextIO, text: str) -> None:
        """Prints what others print, above the lines that change."""
        # In a forked process the lock may be held by a thread that is not there.
        if not self._is_open or not text or os.getpid() != self._process:
            stream.write(text)
            return
        with self._lock:
            if self._lines and not self._is_line_begun:
                self._write(CLEAR_BELOW)
            self._is_line_begun = not text.endswith("\n")
            stream.write(text)
            stream.flush()
            if self._lines and not self._is_line_begun:
                self._write(self._picture())

    def _picture(self) -> str:
        if not self._lines:
            return ""
        # Written over what is there rather than cleared first, which would flicker.
        rows = "".join(f"\r\n{line}{CLEAR_REST_OF_LINE}" for line in self._lines)
        return f"\r{CLEAR_REST_OF_LINE}{rows}\x1b[J\x1b[{len(self._lines)}A\r"

    def _write(self, text: str) -> None:
        try:
            self._out.write(writable(text, self._out))
            self._out.flush()
        except (OSError, ValueError):  # closed, or gone: no reason for a program to fail
            self._is_open = False


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees what is written; what stands in for a stream may not be able to say."""
    return stream is not None and hasattr(stream, "isatty") and stream.isatty()


def writable(text: str, out: TextIO) -> str:
    """Replaces what the encoding of a stream does not have."""
    encoding = getattr(out, "encoding", None) or "utf-8"  # a StringIO has none
    return text.encode(encoding, "replace").decode(encoding)


class _Through:
    """Stands in for a text stream: writes go through a terminal, all else to the stream itself."""

    def __init__(self, terminal: Terminal, stream: TextIO) -> None:
        self._terminal = terminal
        self.stream = stream

    def write(self, text: str) -> int:
        self._terminal.pass_on(self.stream, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
