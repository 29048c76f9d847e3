"""A batch job of SLURM: submitted, followed by its output files, and cancelled."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from torchweft.errors import LaunchError
from torchweft.launch.console import Console, Sink, binary_sink
from torchweft.launch.report import signal_name
from torchweft.launch.run import output_closed
from torchweft.launch.signals import watched_signals

POLL_S = 0.5
"""Seconds between looks at the output files."""
ASK_S = 2.0
"""Seconds between questions to SLURM, whose controller serves all users."""

_ASK_LIMIT_S = 30.0
_SUBMIT_LIMIT_S = 120.0
_READ_BYTES = 1 << 16
_FIELD = re.compile(r"(\w+)=(\S*)")
_CANCEL_S = 15.0

_ENDED = frozenset(
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL "
    "OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED".split()
)


def ask(*command: str) -> str:
    """Runs a command of SLURM and returns what it prints.

    Raises:
        LaunchError: It fails, or is not installed; says what it said.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ASK_LIMIT_S
        )
    except OSError as error:
        raise LaunchError(f"'{command[0]}', a command of SLURM, cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} has not answered within {_ASK_LIMIT_S:g} s; is SLURM's controller up? "
            "'scontrol ping' tells"
        ) from None
    if done.returncode:
        said = " / ".join(done.stderr.split("\n")).strip(" /")
        raise LaunchError(f"SLURM refuses '{command[0]}': {said}", exit_code=done.returncode)
    return done.stdout


def fields_of(job: str) -> dict[str, str]:
    """Returns what SLURM knows of a job."""
    return dict(_FIELD.findall(ask("scontrol", "--oneliner", "show", "job", job)))


def state_of(job: str) -> str:
    """Returns the state of a job; empty if SLURM does not answer."""
    try:
        return fields_of(job).get("JobState", "")
    except LaunchError:
        return ""


class BatchJob:
    """A job in SLURM's queue.

    Args:
        number: Its number.
        out: The file of its standard output.
        err: The file of its standard error.
    """

    def __init__(self, number: str, out: Path, err: Path) -> None:
        self.number = number
        self._tails = (_Tail(out, binary_sink("stdout")), _Tail(err, binary_sink("stderr")))
        self._signals = 0
        self._cancelled_s: float | None = None
        self._status = 0

    @classmethod
    def submit(cls, script: str, options: Sequence[str]) -> BatchJob:
        """Submits a script; its output goes to files in the current folder.

        Raises:
            LaunchError: SLURM refuses it.
        """
        command = [
            *("sbatch", "--parsable", "--requeue", "--open-mode=append", "--job-name=torchweft"),
            *("--output=torchweft-%j.out", "--error=torchweft-%j.err", *options),
        ]
        try:
            done = subprocess.run(
                command,
                input=script,
                capture_output=True,
                text=True,
                check=False,
                timeout=_SUBMIT_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"sbatch has not answered within {_SUBMIT_LIMIT_S:g} s; 'scontrol ping' tells "
                "whether SLURM's controller is up, and 'squeue --me' whether it has the job"
            ) from None
        if done.returncode:
            said = " / ".join(done.stderr.split("\n")).strip(" /")
            raise LaunchError(f"SLURM refuses the job: {said}", exit_code=done.returncode)
        number = done.stdout.strip().partition(";")[0]
        return cls(number, *(Path(f"torchweft-{number}.{end}").resolve() for end in ("out", "err")))

    def follow(self, console: Console) -> int:
        """Shows the job's output until the job has ended; returns its exit status.

        Ctrl-C, or another signal that asks this process to end, cancels the job. Call it from the
        main thread.
        """
        console.announce(
            f"torchweft run: submitted SLURM job {self.number}; its output is also in "
            f"{self._tails[0].path}"
        )
        with selectors.DefaultSelector() as selector:

            def watch(descriptor: int, callback: object) -> None:
                selector.register(descriptor, selectors.EVENT_READ, callback)

            with watched_signals(watch, lambda number: self._cancel(number, console)):
                try:
                    return self._to_the_end(selector, console)
                except BaseException as error:
                    with contextlib.suppress(LaunchError):  # nobody would follow the job
                        ask("scancel", self.number)
                    if isinstance(error, BrokenPipeError):
                        return output_closed()
                    raise
                finally:
                    for tail in self._tails:
                        tail.close()

    def _to_the_end(self, selector: selectors.BaseSelector, console: Console) -> int:
        state, asked_s = "", 0.0
        while True:
            for event, _ in selector.select(POLL_S):
                event.data()
            is_done = False
            if time.monotonic() - asked_s >= ASK_S:
                fields, former = self._fields(state), state
                state, asked_s = fields["JobState"], time.monotonic()
                if state == "PENDING" and former != state:
                    reason = fields.get("Reason", "")
                    console.announce(f"torchweft run: job {self.number} waits ({reason})")
                is_done = state in _ENDED
            for tail in self._tails:
                tail.show()
            if is_done:
                return self._end(state, fields, console)
            if self._cancelled_s is not None and time.monotonic() > self._cancelled_s:
                self._cancelled_s = None
                with contextlib.suppress(LaunchError):  # it has just ended
                    ask("scancel", self.number)

    def _fields(self, state: str) -> dict[str, str]:
        """Returns what SLURM knows of the job; its former state while SLURM does not answer."""
        try:
            return {"JobState": state, **fields_of(self.number)}
        except LaunchError as error:
            if "Invalid job id" in str(error):
                raise
            return {"JobState": state}

    def _end(self, state: str, fields: dict[str, str], console: Console) -> int:
        code, _, number = fields.get("ExitCode", "0:0").partition(":")
        status = int(code) or (128 + int(number) if int(number) else 0)
        if state not in ("COMPLETED", "FAILED"):
            console.announce(f"torchweft run: SLURM job {self.number} ended as {state}")
            status = status or 1
        return self._status or status

    def _cancel(self, number: int, console: Console) -> None:
        """Has the job's own launcher end the workers; a second time, or later, cancels the job."""
        self._signals += 1
        self._status = 128 + number
        console.announce(
            f"torchweft run: {signal_name(number)}, cancelling SLURM job {self.number}"
        )
        with contextlib.suppress(LaunchError):  # it has just ended
            if self._signals == 1 and state_of(self.number) == "RUNNING":
                ask("scancel", "--batch", "--signal=INT", self.number)
                self._cancelled_s = time.monotonic() + _CANCEL_S
            else:
                ask("scancel", self.number)


class _Tail:
    """Shows what is appended to a file."""

    def __init__(self, path: Path, sink: Sink) -> None:
        self.path = path
        self._sink = sink
        self._descriptor: int | None = None

    def show(self) -> None:
        if self._descriptor is None:
            with contextlib.suppress(FileNotFoundError):  # the job has not begun
                self._descriptor = os.open(self.path, os.O_RDONLY)
        while self._descriptor is not None and (data := os.read(self._descriptor, _READ_BYTES)):
            self._sink.write(data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
