"""Says in words how a worker ended, so that the cause is what a person reads last."""

from __future__ import annotations

import signal
import time
from collections import deque

from torchweft.launch.worker import WorkerExit

TAIL_LINES = 60
"""Lines of standard error that are kept of each worker."""

TRACEBACK_START = b"Traceback (most recent call last):"


def signal_name(number: int) -> str:
    """Returns a signal's name, or its number where it has none."""
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
    """Says how a process ended, as the end of a sentence that starts with its name.

    Args:
        exit_code: Its exit status; the negative number of a signal that killed it.
        is_memory_kill: Whether the kernel killed it for want of memory, where that is known.
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    hint = _KILL_HINTS[is_memory_kill] if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-exit_code)}{hint}"


def shell_status(exit_code: int) -> int:
    """Returns the exit status by which a shell would report ``exit_code``."""
    return 128 - exit_code if exit_code < 0 else exit_code


def describe_worker(ended: WorkerExit) -> str:
    """Names a worker that ended, and how it did."""
    return (
        f"worker {ended.name!r} (rank {ended.rank}, pid {ended.pid}) "
        f"{describe_exit(ended.exit_code, ended.is_memory_kill)}"
    )


def describe_death(ended: WorkerExit) -> str:
    """Says when a worker ended, which one, how, and how long it had run."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended.ended_at))
    return f"{moment}: {describe_worker(ended)} after {describe_duration(ended.ran_s)}"


def describe_duration(seconds: float) -> str:
    """Returns a length of time with the units that a person would use for it."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


class ErrorTail:
    """Keeps the last lines that one worker wrote to standard error."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.shown_at = 0
        """The number of the last of them among all lines of the run."""

    def extend(self, lines: list[bytes]) -> None:
        """Takes the next lines; the oldest are forgotten."""
        self._lines.extend(lines)

    def text(self) -> str:
        """Returns the lines, indented; from the first traceback among them where one is."""
        lines = list(self._lines)
        if TRACEBACK_START in lines:
            lines = lines[lines.index(TRACEBACK_START) :]
        return "\n".join("    " + line.decode(errors="replace") for line in lines)


def error_line(tail: str) -> str:
    """Returns the line of the last traceback that says what was raised; "" without one."""
    lines = [line.removeprefix("    ") for line in tail.splitlines()]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return ""
    return next((line for line in lines[frames[-1] :] if line[:1].strip()), "")


def failure_report(ended: WorkerExit, tail: str, is_in_view: bool = False) -> str:
    """Returns the message about a worker that failed; its last lines come last.

    Args:
        ended: How it ended.
        tail: Its last lines.
        is_in_view: Whether they have just been shown; of a traceback, one line is enough then.
    """
    if not tail:
        return f"{describe_death(ended)}; it wrote nothing to standard error"
    raised = error_line(tail) if is_in_view else ""
    if raised:
        return f"{describe_death(ended)}: {raised}"
    return f"{describe_death(ended)}; its last lines:\n{tail}"
