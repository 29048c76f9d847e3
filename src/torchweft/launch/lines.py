"""Splits a worker's output into whole lines, as a terminal would show them.

A worker's output arrives in pieces that end anywhere, and pieces of several workers must not meet
within a line. A carriage return restarts the line, as progress bars do. The text before it is no
longer visible, so only the last state of such a line is kept.
"""

from __future__ import annotations

LINE_LIMIT_BYTES = 1 << 20
"""Longer lines are split, so that output without newlines cannot fill the memory."""


class LineAssembler:
    """Assembles pieces of one output stream into lines."""

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
