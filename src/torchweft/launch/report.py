"""Describes how a worker ended, with the cause as the last text that a person reads."""

from __future__ import annotations

import signal
import time
from collections import deque

from torchweft.launch.worker import WorkerExit

TAIL_LINES = 60
"""Lines of standard error kept for each worker."""

TRACEBACK_START = b"Traceback (most recent call last):"


def signal_name(number: int) -> str:
    """Returns a signal's name, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_KILL_HINTS = {
    None: " (out of memory, or killed by hand)",
    True: " (out of memory)",
    False: " (not out of memory)",
}


def describe_exit(exit_code: int, is_memory_kill: bool | None = None) -> str:
    """Describes how a process ended, as the end of a sentence that starts with its name.

    Args:
        exit_code: Its exit status, or the negative number of the signal that killed it.
        is_memory_kill: Whether the kernel killed it for lack of memory; None if unknown.
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    hint = _KILL_HINTS[is_memory_kill] if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-exit_code)}{hint}"


def shell_status(exit_code: int) -> int:
    """Returns the exit status by which a shell would report ``exit_code``."""
    return 128 - exit_code if exit_code < 0 else exit_code


def describe_worker(ended: WorkerExit) -> str:
    """Returns the name of an ended worker and how it ended."""
    return (
        f"worker {ended.name!r} (rank {ended.rank}, pid {ended.pid}) "
        f"{describe_exit(ended.exit_code, ended.is_memory_kill)}"
    )


def describe_death(ended: WorkerExit) -> str:
    """Returns when a worker ended, its name, how it ended, and how long it had run."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended.ended_at))
    return f"{moment}: {describe_worker(ended)} after {describe_duration(ended.ran_s)}"


def describe_duration(seconds: float) -> str:
    """Returns a duration in the units that a person would use."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


class ErrorTail:
    """Keeps the last lines that one worker wrote to standard error."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.shown_at = 0
        """The number of the last kept line among all lines of the run."""

    def extend(self, lines: list[bytes]) -> None:
        """Appends lines; drops the oldest."""
        self._lines.extend(lines)

    def text(self) -> str:
        """Returns the lines, indented; starts at the first traceback if there is one."""
        lines = list(self._lines)
        if TRACEBACK_START in lines:
            lines = lines[lines.index(TRACEBACK_START) :]
        return "\n".join("    " + line.decode(errors="replace") for line in lines)


def error_line(tail: str) -> str:
    """Returns the last traceback's line that names the exception; "" without a traceback."""
    lines = [line.removeprefix("    ") for line in tail.splitlines()]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return ""
    return next((line for line in lines[frames[-1] :] if line[:1].strip()), "")


def failure_report(ended: WorkerExit, tail: str, is_in_view: bool = False) -> str:
    """Returns the message about a failed worker; the worker's last lines come last.

    Args:
        ended: How it ended.
        tail: Its last lines.
        is_in_view: Whether they have just been shown; then one line of a traceback is enough.
    """
    if not tail:
        return f"{describe_death(ended)}; it wrote nothing to standard error"
    raised = error_line(tail) if is_in_view else ""
    if raised:
        return f"{describe_death(ended)}: {raised}"
    return f"{describe_death(ended)}; its last lines:\n{tail}"
