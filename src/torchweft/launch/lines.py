"""Cuts what a worker writes into whole lines, the way a terminal would show them.

A worker's output arrives in pieces that end anywhere: several workers' pieces must not meet
inside one line. A carriage return starts the line again, as progress bars do: what was before it
is no longer seen, so only the last state of such a line is kept.
"""

from __future__ import annotations

LINE_LIMIT_BYTES = 1 << 20
"""A line longer than this is broken, so that output without a newline cannot fill the memory."""


class LineAssembler:
    """Assembles pieces of one output stream into lines."""

    def __init__(self) -> None:
        self._unfinished = b""

    @property
    def partial(self) -> bytes:
        """The line that has no newline yet, as a terminal would show it."""
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
        """Returns what is left at the end of the stream, as at most one line."""
        partial, self._unfinished = self.partial, b""
        return [partial] if partial else []


def _visible(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _last_state(line: bytes) -> bytes:
    # Carriage returns at the end stay: until something follows them they hide nothing.
    text = line.rstrip(b"\r")
    return text.rpartition(b"\r")[2] + line[len(text) :]
