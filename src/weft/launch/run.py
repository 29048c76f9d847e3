"""Runs one script in several worker processes, as the command ``weft run`` does."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from weft import knobs
from weft.errors import LaunchError
from weft.launch.console import Console
from weft.launch.control import Ladder
from weft.launch.job import Job
from weft.launch.nursery import WARM_MODULES, Nursery
from weft.launch.port import ReservedPort
from weft.launch.report import failure_report, shell_status, signal_name
from weft.launch.supervisor import KILL_LADDER, Supervisor
from weft.launch.worker import (
    WorkerExit,
    WorkerSpec,
    compute_environment,
    rendezvous_environment,
)

INTERRUPT_LADDER: Ladder = [(signal.SIGINT, 1.0), (signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5)]
"""After Ctrl-C a worker may tidy up, but the person who pressed it gets the prompt back soon."""

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE


def run_workers(
    names: Sequence[str],
    job: Job,
    *,
    console: Console,
    master_port: int = 0,
    is_warm: bool = False,
) -> int:
    """Runs ``job`` in one worker for each name, until all have ended or one has failed.

    Call it from the main thread: it handles signals while it runs.

    Args:
        names: The workers' names, in order of their ranks.
        job: What each of them does.
        console: Where their output goes.
        master_port: The port at which they meet; 0 has a free one chosen.
        is_warm: Whether workers are forked from a process that has imported torch.

    Returns:
        An exit status as shells report it: that of the first worker that failed, 130 after
        Ctrl-C, 0 when all went well.
    """
    with ReservedPort(master_port) as port:
        environment = compute_environment(os.environ, len(names))
        workers = [
            WorkerSpec(
                name,
                rank,
                job,
                environment | rendezvous_environment(name, rank, len(names), port.number),
            )
            for rank, name in enumerate(names)
        ]
        preload = WARM_MODULES if is_warm else ()
        with Nursery(preload=preload, environment=environment) as nursery:
            return _Run(nursery, console, workers).to_the_end()


class _Run:
    """The state of one run: what ended it, and with which status."""

    def __init__(self, nursery: Nursery, console: Console, workers: Sequence[WorkerSpec]) -> None:
        self._nursery = nursery
        self._console = console
        self._supervisor = Supervisor(nursery, console, workers, self._worker_ended)
        self._status = 0
        self._is_ending = False
        self._failure: WorkerExit | None = None
        self._signals: deque[int] = deque()
        self._signal_count = 0

    def to_the_end(self) -> int:
        try:
            with self._signals_watched():
                self._supervisor.start()
                while not self._supervisor.is_done:
                    self._supervisor.poll()
        except BrokenPipeError:
            return self._output_closed()
        except LaunchError as error:
            self._console.announce(f"weft run: {error}")
            return self._status or 1
        finally:
            self._nursery.close()
            self._supervisor.close()
        if self._failure is not None:
            tail = self._supervisor.tail(self._failure.name)
            self._console.announce(f"weft run: {failure_report(self._failure, tail)}")
        return self._status

    def _output_closed(self) -> int:
        """Ends quietly, as a program does whose output goes to ``head``."""
        # What is buffered cannot be written, and the interpreter would complain of that at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return BROKEN_PIPE_STATUS

    def _worker_ended(self, ended: WorkerExit) -> None:
        if ended.exit_code != 0 and not self._is_ending:
            self._failure = ended
            self._end(shell_status(ended.exit_code), _ladder(signal.SIGTERM))

    def _end(self, status: int, ladder: Ladder) -> None:
        if not self._is_ending:
            self._status = status
        self._is_ending = True
        self._supervisor.stop(ladder)

    @contextmanager
    def _signals_watched(self) -> Iterator[None]:
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        self._supervisor.watch(wake_read.fileno(), lambda: self._handle_signals(wake_read))
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.signal(number, self._note_signal) for number in numbers}
        wake_fd = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wake_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            wake_read.close()
            wake_write.close()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _handle_signals(self, wake: socket.socket) -> None:
        wake.recv(4096)
        while self._signals:
            self._signalled(self._signals.popleft())

    def _signalled(self, number: int) -> None:
        self._signal_count += 1
        is_repeated = self._signal_count > 1
        self._console.announce(
            f"weft run: {signal_name(number)}, "
            + ("killing the workers" if is_repeated else "ending the workers")
        )
        if is_repeated:
            self._end(128 + number, KILL_LADDER)
        else:
            ladder = INTERRUPT_LADDER if number == signal.SIGINT else _ladder(number)
            self._end(128 + number, ladder)


def _ladder(number: int) -> Ladder:
    return [(number, knobs.LAUNCH_GRACE_S.get()), (signal.SIGKILL, 0.5)]
