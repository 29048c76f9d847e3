"""Reports how workers end: the cause, the worker's last lines, and the launcher's response.

The cause is the last text of a report that a person reads. The functions ``describe_...`` put the
end of a process into words, and ``RunReport`` writes a line for each event of a run. Two facts are
not in an exit code: ``MemoryKills`` detects whether the kernel has killed for lack of memory, and
``Repeats`` whether a worker fails again at once, because of a bug.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchweft.launch.console import Console
from torchweft.launch.restarts import GROUP, Attempt, RestartPolicy
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
    ending = f"ended, as {ended.loss}," if ended.loss else ""
    return (
        f"worker {ended.name!r} (rank {ended.rank}, pid {ended.pid}) "
        f"{ending or describe_exit(ended.exit_code, ended.is_memory_kill)}"
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


# Kills for lack of memory

_COUNTER = "oom_kill"


class MemoryKills:
    """Detects whether the kernel has killed for lack of memory: a ``SIGKILL`` does not tell.

    Control groups count such kills: ``oom_kill`` in ``memory.events`` of version 2, and in
    ``memory.oom_control`` of version 1. Workers are in the group of their launcher.

    Args:
        mount: Where control groups are mounted.
        membership: The file that names the control groups of this process.
    """

    def __init__(
        self,
        mount: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
    ) -> None:
        self._file = next(
            (file for file in _candidates(mount, membership) if _read(file) is not None), None
        )
        self._seen = 0 if self._file is None else _read(self._file) or 0

    def take_one(self) -> bool | None:
        """Returns whether there was a kill not yet returned here; None if that is unknown.

        Call it once for each killed process: the kernel may kill several at a time.
        """
        count = None if self._file is None else _read(self._file)
        if count is None:
            return None
        is_new = count > self._seen
        self._seen += is_new
        return is_new


def _candidates(mount: Path, membership: Path) -> Iterator[Path]:
    """Returns the possible paths of the counter.

    In a container, the group's path may be a path of the host, which is not visible there. The
    container's group is then at the mount itself.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.oom_control"
        elif not controllers:
            root, name = mount, "memory.events"
        else:
            continue
        yield root / path.lstrip("/") / name
        yield root / name


def _read(file: Path) -> int | None:
    try:
        fields = (line.split() for line in file.read_text().splitlines())
        return next(int(value) for name, value in fields if name == _COUNTER)
    except (OSError, ValueError, StopIteration):
        return None


# Repeated failures

AT_ONCE_S = 10.0
"""A life shorter than this, in seconds, has made no progress."""

_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Repeats:
    """Distinguishes a bug, which fails again at once, from a transient fault.

    Remembers how short lives ended.

    Args:
        is_of_group: Whether the workers restart together, so that any of them may fail first.
    """

    def __init__(self, is_of_group: bool) -> None:
        self._is_of_group = is_of_group
        self._former: dict[str, str] = {}

    def is_repeated(self, ended: WorkerExit, tail: str) -> bool:
        """Whether a life failed at once, with the same traceback as the previous life.

        Args:
            ended: How it ended.
            tail: The last lines that it wrote to standard error.
        """
        key = "" if self._is_of_group else ended.name
        is_short = ended.exit_code > 0 and ended.ran_s < AT_ONCE_S and error_line(tail)
        signature = _VARYING.sub("#", tail) if is_short else ""
        former = self._former.get(key)
        self._former[key] = signature
        return bool(signature) and signature == former


# The report of a run

_DEATHS_LISTED = 10


class RunReport:
    """Writes one line for each event, at once, and a summary at the end.

    Args:
        console: Where the lines go.
        policy: The policy when a worker dies.
        names: The workers' names.
        speaker: The name at the start of each message.
        has_status: Whether the exit code of a worker that ends the run is that of the run.
    """

    def __init__(
        self,
        console: Console,
        policy: RestartPolicy,
        names: Sequence[str],
        speaker: str = "torchweft run",
        *,
        has_status: bool = True,
    ) -> None:
        self._has_status = has_status
        self._speaker = speaker
        self.console = console
        self.policy = policy
        self.names = names
        self._deaths: list[WorkerExit] = []
        self._awaited: set[str] = set()

    def say(self, text: str) -> None:
        """Writes one message of the launcher."""
        self.console.announce(f"{self._speaker}: {text}")

    def died(
        self,
        ended: WorkerExit,
        attempt: Attempt | None,
        others: int = 0,
        *,
        is_repeated: bool = False,
    ) -> None:
        """Reports that a worker has died, and what follows.

        Args:
            ended: How it ended.
            attempt: Its restart, or that of the group; None if the run is over.
            others: How many other workers run now.
            is_repeated: Whether the run is over because the worker failed at once, as before.
        """
        self._deaths.append(ended)
        if is_repeated:
            self.say(
                f"{describe_death(ended)}; it failed as the last time, at once, and is not "
                f"started again{self._ending_of_run(ended)}"
            )
        elif attempt is None:
            self._over(ended, others)
        elif self.policy.scope == GROUP:
            self.say(f"{describe_death(ended)}; {_ending(others)}")
        else:
            self._awaited.add(ended.name)
            self.say(f"{describe_death(ended)}; starting it again {self._when(attempt)}")

    def lost_before(self, ended: WorkerExit) -> None:
        """Reports a worker whose host is known to be lost only while the others already end.

        Workers see the loss of another one within milliseconds, and may end because of it.
        """
        self._deaths.append(ended)
        self.say(f"{describe_death(ended)}; others may have ended because of it")

    def group_waits(self, attempt: Attempt) -> None:
        """Reports that all workers have ended, and when they are restarted."""
        self._awaited.update(self.names)
        self.say(f"starting {self._all()} again {self._when(attempt)}")

    def started(self, name: str, pid: int) -> None:
        """Reports that a restarted worker runs again, or all restarted workers of the group."""
        if name not in self._awaited:
            return
        self._awaited.discard(name)
        if self.policy.scope != GROUP or len(self.names) == 1:
            self.say(f"worker {name!r} runs again, with pid {pid}")
        elif not self._awaited:
            self.say(f"{self._all()} run again")

    def summarize(self, restarts: int) -> None:
        """Lists the deaths of a run with this number of restarts, if it is not 0."""
        if not restarts:
            return
        subject = "the group was" if self.policy.scope == GROUP else "workers were"
        times = {1: "once", 2: "twice"}.get(restarts, f"{restarts} times")
        lines = [f"{subject} started again {times}; these had died:"]
        if len(self._deaths) > _DEATHS_LISTED:
            lines.append(f"    ({len(self._deaths) - _DEATHS_LISTED} earlier ones)")
        lines += [f"    {describe_death(ended)}" for ended in self._deaths[-_DEATHS_LISTED:]]
        self.say("\n".join(lines))

    def _all(self) -> str:
        count = len(self.names)
        return "it" if count == 1 else f"{'both' if count == 2 else f'all {count}'} workers"

    def _over(self, ended: WorkerExit, others: int) -> None:
        limit = self.policy.limit
        if limit:
            spent = "the one restart" if limit == 1 else f"all {limit} restarts"
            verb = "is" if limit == 1 else "are"
            self.say(
                f"{describe_death(ended)}; {spent}{self._window()} {verb} used up"
                f"{self._ending_of_run(ended)}"
            )
        elif others:
            self.say(f"{describe_death(ended)}; {_ending(others)}")

    def _ending_of_run(self, ended: WorkerExit) -> str:
        code = shell_status(ended.exit_code)
        return f", ending the run with exit code {code}" if self._has_status else ""

    def _when(self, attempt: Attempt) -> str:
        return (
            f"in {attempt.delay_s:.1f} s, restart {attempt.number} of {self.policy.limit}"
            f"{self._window()}"
        )

    def _window(self) -> str:
        if math.isinf(self.policy.window_s):
            return ""
        return f" within {describe_duration(self.policy.window_s)}"


def _ending(others: int) -> str:
    if not others:
        return "no other worker runs"
    return "ending the other one" if others == 1 else f"ending the other {others}"
