"""The processes of one side, which live through the run and are stopped between measurements.

The threads of an idle torch RPC process poll and use half a core, which would be charged to the
side that is measured meanwhile. So a side is stopped by SIGSTOP except while it is measured.
However the run ends, no process is left behind: each is continued or killed here, and the kernel
kills it when this process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.frame.figures import Round
from benchmarks.frame.place import Place
from benchmarks.frame.placement import Cores
from benchmarks.frame.question import Question, Row, Side

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
ORDER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


class SideFailed(RuntimeError):
    """A side does not answer, or has ended; the message has the last lines of its errors."""


class Group:
    """The processes of a side, and orders to them.

    Args:
        side: The side.
        processes: Its processes by rank; the first makes the calls.
        log: The standard error of the processes.
        limit_s: The time that one round of a row may take.
    """

    def __init__(
        self,
        side: Side,
        processes: Sequence[subprocess.Popen[str]],
        log: IO[bytes],
        limit_s: float,
    ) -> None:
        self.side = side
        self._limit_s = limit_s
        self._processes = processes
        self._log = log
        ready = [self._read_answer(process, START_TIMEOUT_S) for process in processes]
        self.works = set(ready[0])

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def measure(self, row: Row, operations: int) -> Round:
        """Continues all processes, has the row's work done, and stops the processes again."""
        order = {
            "work": row.work_name,
            "operations": operations,
            "warm_up": row.warm_up,
            "pids": [] if row.activity else self.pids,  # the activity's CPU time would count
        }
        with self._awake(), self._busy(row.activity):
            self._order(self._processes[0], order)
            return Round(**self._read_answer(self._processes[0], self._limit_s))

    def sleep(self) -> None:
        """Stops all processes, and returns when all are stopped."""
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            if process.returncode is None:  # WNOWAIT: Popen reaps the process
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        """Closes the input of all processes, and kills those that do not end in time."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            _close(process.stdin)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{self.side.name}: a process does not end and is killed", file=sys.stderr)
        end(self._processes)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.sleep()

    @contextlib.contextmanager
    def _busy(self, activity: str) -> Iterator[None]:
        if activity:
            self._set_activity(activity)
        yield
        if activity:
            self._set_activity("")

    def _set_activity(self, activity: str) -> None:
        for process in self._processes[1:]:
            self._order(process, {"activity": activity})
        for process in self._processes[1:]:
            self._read_answer(process, ORDER_TIMEOUT_S)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _order(self, process: subprocess.Popen[str], order: object) -> None:
        assert process.stdin is not None
        try:
            print(json.dumps(order), file=process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure("a process has ended") from None

    def _read_answer(self, process: subprocess.Popen[str], timeout_s: float) -> Any:
        """Reads one line; only one answer is ever pending, so none can wait in the buffer."""
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            raise self._failure(f"no answer in {timeout_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise self._failure("a process has ended")
        return json.loads(line)

    def _failure(self, what: str) -> SideFailed:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-20:]
        return SideFailed("\n".join([f"side {self.side.name}: {what}", *tail]))


@contextlib.contextmanager
def started_group(question: Question, side: Side, cores: Cores) -> Iterator[Group]:
    """Starts the processes of ``side`` on their cores, and ends them after the block."""
    size = 1 if side.runner in ("alone", "forked") else question.size
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile() as log:
        try:
            _start_all(question, side, cores, size, processes, log)
            group = Group(side, processes, log, question.limit_s)
            group.sleep()
            yield group
            group.stop()
        finally:
            end(processes)


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kills all remaining processes, running or stopped, and releases their resources."""
    for process in processes:
        # Kill its group: the process may have started others, and may itself be gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _close(process.stdin)
        _close(process.stdout)


def _start_all(
    question: Question,
    side: Side,
    cores: Cores,
    size: int,
    processes: list[subprocess.Popen[str]],
    log: IO[bytes],
) -> None:
    with contextlib.ExitStack() as ends:  # close our copies, or no worker sees end-of-file
        descriptors: list[list[int]] = [[] for _ in range(size)]
        if side.runner == "raw":
            for rank in range(1, size):
                pair = [ends.enter_context(end) for end in socket.socketpair()]
                descriptors[0].append(pair[0].fileno())
                descriptors[rank].append(pair[1].fileno())
        port = free_port()
        for rank in range(size):
            own_options = side.options_by_rank[rank] if side.options_by_rank else {}
            place = Place(
                folder=question.folder,
                side=side.name,
                runner=side.runner,
                api=side.api,
                rank=rank,
                size=question.size if side.runner == "forked" else size,
                cores=sorted(cores(rank)),
                cores_of_others=[sorted(cores(other)) for other in range(1, question.size)],
                address=side.address,
                port=port,
                options={**side.options, **own_options},
                descriptors=descriptors[rank],
            )
            processes.append(_start(side, place, log))


def _start(side: Side, place: Place, log: IO[bytes]) -> subprocess.Popen[str]:
    prefix = list(side.prefixes[place.rank]) if side.prefixes else []
    program = f"{place.folder}.program" if side.runner == "forked" else "benchmarks.frame.worker"
    command = [side.interpreter or sys.executable, "-W", "ignore", "-m", program, place.as_json()]
    return subprocess.Popen(
        [*prefix, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        pass_fds=place.descriptors,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # its own process group: Ctrl-C reaches the parent only
        env={**os.environ, "OMP_NUM_THREADS": "1", **side.environment},
    )


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def free_port() -> int:
    """Returns a port that was free a moment ago; all processes of a side must know it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
