"""Runs tests side by side, each in a process group of its own that ends with it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.contract.conformance.cases import CaseName, Outcome, Result

POLL_S = 0.01

GRACE_S = 10.0
"""How long a test may exceed its limit: its own watcher ends it at the limit and says where its
workers were, so that the runner need not."""

_EXIT_CODES: dict[int, Outcome] = {0: "pass", 1: "fail", 2: "skip"}


def default_jobs(uses_gpu: bool = False) -> int:
    """Returns how many tests run side by side; tests wait a good part of the time.

    Args:
        uses_gpu: Whether tests use a GPU. Each of their workers, four for most tests, then takes
            half a second of a core and half a GB of the GPU to begin.
    """
    cores = len(os.sched_getaffinity(0))
    return min(8, max(2, cores // 2)) if uses_gpu else min(32, max(2, 3 * cores // 2))


@dataclass(frozen=True)
class Running:
    """A test that runs: its process leads a group of the same number."""

    case: CaseName
    pid: int
    log: Path
    begin: float


class Runner:
    """Runs tests of the classes given, and keeps what they write in a folder.

    Args:
        classes: Test classes by suite and name.
        logs: Folder for one file per test and run; created if it is missing.
        jobs: How many tests run side by side.
        limit_s: After how long a test has failed.
    """

    def __init__(
        self,
        classes: dict[str, type[unittest.TestCase]],
        logs: Path,
        jobs: int,
        limit_s: float,
    ) -> None:
        self.classes = classes
        self.logs = logs
        self.jobs = jobs
        self.limit_s = limit_s
        self._running: dict[int, Running] = {}

    @property
    def running(self) -> list[CaseName]:
        """The tests that run now, the oldest first."""
        return [test.case for test in self._running.values()]

    def run(self, cases: Sequence[CaseName], repeat: int = 1) -> Iterator[Result]:
        """Runs all tests in their order, then all once more, and yields each as it ends."""
        self.logs.mkdir(parents=True, exist_ok=True)
        todo = [(case, turn) for turn in range(repeat) for case in cases][::-1]
        # Frozen objects stay in memory pages that the forked processes share.
        gc.freeze()
        with temporary_folder():
            try:
                while todo or self._running:
                    while todo and len(self._running) < self.jobs:
                        case, turn = todo.pop()
                        self._start(case, turn, repeat)
                    time.sleep(POLL_S)
                    yield from self._reap()
            finally:
                for pid in list(self._running):
                    self._end(pid)

    def _start(self, case: CaseName, turn: int, repeat: int) -> None:
        log = self.logs / (f"{case}.{turn + 1}.log" if repeat > 1 else f"{case}.log")
        sys.stdout.flush()  # or the child would write the rest of the buffer again
        pid = os.fork()
        if pid == 0:
            _run_here(self.classes[f"{case.suite}.{case.group}"], case.test, log)
        # The child does the same: the two race, and the first one makes the group.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._running[pid] = Running(case, pid, log, time.monotonic())

    def _reap(self) -> Iterator[Result]:
        for test in list(self._running.values()):
            seconds = time.monotonic() - test.begin
            # It stays a zombie, so that its pid still names its group for the kill below.
            has_ended = os.waitid(os.P_PID, test.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if not has_ended and seconds < self.limit_s + GRACE_S:
                continue
            code = self._end(test.pid)
            outcome = _EXIT_CODES.get(code, "crash") if has_ended else "timeout"
            if outcome == "fail" and seconds >= self.limit_s:
                outcome = "timeout"
            yield Result(test.case, outcome, seconds, test.log)

    def _end(self, pid: int) -> int:
        """Kills a test's remaining processes; returns the exit code of its first one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        del self._running[pid]
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def temporary_folder() -> Iterator[None]:
    """Puts the block's temporary files into one folder, and removes it at the end.

    PyTorch's tests leave their temporary files behind.
    """
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = None
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def _run_here(case: type[unittest.TestCase], test: str, log: Path) -> None:
    """Runs one test in this process, a child, and ends it; the exit code is the outcome."""
    code = 3
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _write_to(log)
        result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(case(test))
        code = 0 if result.wasSuccessful() else 1
        if result.skipped:
            code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _write_to(log: Path) -> None:
    """Redirects the output of this process and its children to a file; their input is empty."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # The present streams may be those of a program that captures output.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
