"""Writes the output of many workers to one place, each line prefixed by its worker's name.

On a terminal an unfinished line (a prompt, a progress bar) is shown after a short pause, and is
rewritten when it continues. As soon as another worker writes, the unfinished line stays as it is
and a fresh line begins. Files and pipes receive whole lines only.

A worker's output arrives in pieces that end anywhere, and pieces of several workers must not meet
within a line. So a ``LineAssembler`` splits each stream into whole lines, as a terminal would show
them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from torchweft import standard_streams
from torchweft.errors import LaunchError

COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
"""Terminal colours that workers take in turn; red is left to errors."""

CLEAR_LINE = b"\r\x1b[K"


class Sink(Protocol):
    """A place that text is written to."""

    def write(self, data: bytes) -> None:
        """Writes all of ``data`` and flushes it."""

    def is_terminal(self) -> bool:
        """Whether a person sees the text as it is written."""


class BinarySink:
    """Writes to one binary stream, byte for byte."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        """Writes all of ``data`` and flushes it.

        Raises:
            LaunchError: It cannot be written, for instance as the disk is full; later data are
                dropped.
            BrokenPipeError: Nobody reads it any more.
        """
        try:
            self._stream.write(data)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            standard_streams.drop(self._stream.fileno())
            raise LaunchError(
                f"the output of the workers cannot be written: {error.strerror}"
            ) from error

    def is_terminal(self) -> bool:
        """Whether a person sees the text as it is written."""
        return self._stream.isatty()


class InterpreterSink:
    """Writes to the current ``sys.stdout`` or ``sys.stderr``: a notebook replaces them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, data: bytes) -> None:
        """Writes all of ``data`` and flushes it.

        The thread that writes reads what workers print, and sees them end. So it goes on if the
        stream is missing, closed or broken: the program learns of that when it prints itself.
        """
        stream: Any = getattr(sys, self._name)
        text = data.decode(errors="replace")
        with contextlib.suppress(Exception):  # The program may have put any object there.
            encoding = getattr(stream, "encoding", None) or "utf-8"  # A StringIO has none.
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()

    def is_terminal(self) -> bool:
        """Whether a person sees the text as it is written, and types nothing meanwhile."""
        with contextlib.suppress(Exception):
            return not hasattr(sys, "ps1") and bool(getattr(sys, self._name).isatty())
        return False


@dataclass(frozen=True)
class Label:
    """The prefix of a worker's lines.

    Attributes:
        name: The worker's name.
        index: Its position among the workers, which selects its colour.
        width: Columns of the longest worker name of the run.
    """

    name: str
    index: int
    width: int

    def render(self, *, in_colour: bool) -> bytes:
        """Returns the bytes before a line."""
        padding = " " * (self.width - len(self.name) + 1)
        if not in_colour:
            return f"[{self.name}]{padding}".encode()
        colour = COLOURS[self.index % len(COLOURS)]
        # The reset comes first as well: a worker may have left its own colour switched on.
        return f"\x1b[0m\x1b[{colour}m[{self.name}]\x1b[0m{padding}".encode()


class Console:
    """Writes the workers' lines to two sinks; thread-safe.

    Args:
        out: Where standard output goes.
        err: Where standard error goes.
        environment: Read for ``NO_COLOR``.
    """

    def __init__(self, out: Sink, err: Sink, environment: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._err = err
        self._wants_colour = not environment.get("NO_COLOR")
        self._unfinished: tuple[Label, bool] | None = None
        self._lock = threading.Lock()

    def write_lines(self, label: Label, lines: list[bytes], *, is_error: bool) -> None:
        """Writes whole lines of one worker at once."""
        if not lines:
            return
        sink = self._err if is_error else self._out
        prefix = label.render(in_colour=self._wants_colour and sink.is_terminal())
        with self._lock:
            start = self._leave_unfinished(label, is_error)
            sink.write(start + b"".join(prefix + line + b"\n" for line in lines))

    def show_partial(self, label: Label, partial: bytes, *, is_error: bool) -> None:
        """Shows an unfinished line if the sink is a terminal."""
        sink = self._err if is_error else self._out
        if not partial or not sink.is_terminal():
            return
        with self._lock:
            start = self._leave_unfinished(label, is_error)
            sink.write(start + label.render(in_colour=self._wants_colour) + partial)
            self._unfinished = (label, is_error)

    def announce(self, text: str) -> None:
        """Writes a message of the launcher itself to standard error."""
        with self._lock:
            start = b"\n" if self._unfinished is not None else b""
            self._unfinished = None
            self._err.write(start + text.encode(errors="replace") + b"\n")

    def _leave_unfinished(self, label: Label, is_error: bool) -> bytes:
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            return b""
        return CLEAR_LINE if unfinished == (label, is_error) else b"\n"


def command_console() -> Console:
    """Returns the console of the ``torchweft`` command: bytes pass through unchanged."""
    return Console(binary_sink("stdout"), binary_sink("stderr"))


def binary_sink(name: str) -> Sink:
    """Returns the sink of ``"stdout"`` or ``"stderr"``, whatever the program has put there."""
    buffer = getattr(getattr(sys, name), "buffer", None)
    return InterpreterSink(name) if buffer is None else BinarySink(buffer)


def session_console() -> Console:
    """Returns a console for a script, a notebook or the interactive prompt."""
    return Console(InterpreterSink("stdout"), InterpreterSink("stderr"))


# The lines of one stream

LINE_LIMIT_BYTES = 1 << 20
"""Longer lines are split, so that output without newlines cannot fill the memory."""


class LineAssembler:
    """Assembles pieces of one output stream into lines.

    A carriage return restarts the line, as progress bars do. The text before it is no longer
    visible, so only the last state of such a line is kept.
    """

    def __init__(self) -> None:
        self._unfinished = b""

    @property
    def partial(self) -> bytes:
        """The unfinished line, as a terminal would show it."""
        return _visible(self._unfinished)

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the next piece and returns the lines that it completes, without their newlines."""
        *lines, rest = (self._unfinished + data).split(b"\n")
        completed = [_visible(line) for line in lines]
        while len(rest) > LINE_LIMIT_BYTES:
            completed.append(_visible(rest[:LINE_LIMIT_BYTES]))
            rest = rest[LINE_LIMIT_BYTES:]
        self._unfinished = _last_state(rest)
        return completed

    def finish(self) -> list[bytes]:
        """Returns the unfinished line at the end of the stream, as a list of at most one line."""
        partial, self._unfinished = self.partial, b""
        return [partial] if partial else []


def _visible(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _last_state(line: bytes) -> bytes:
    # Trailing carriage returns stay: they hide nothing until text follows them.
    text = line.rstrip(b"\r")
    return text.rpartition(b"\r")[2] + line[len(text) :]
