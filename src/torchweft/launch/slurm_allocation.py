"""An allocation of SLURM for the time of one cluster: taken by ``salloc``, and given back."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence

from torchweft.errors import LaunchError
from torchweft.launch.slurm_job import fields_of

_SAY_AFTER_S = 2.0
"""Seconds in the queue after which that is said; an idle cluster grants sooner."""
_ASK_S = 10.0
_READ_BYTES = 1 << 12
_RELEASE_S = 15.0
_NUMBER = re.compile(r"job allocation (\d+)")

# The command in the allocation ends with its input, so with this process.
_TELL = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'


class Allocation:
    """An allocation, which ends with this process, however it ends.

    Args:
        requirements: Options of ``salloc``.
    """

    def __init__(self, requirements: Sequence[str]) -> None:
        self._is_granted = False
        self._said = b""
        self._salloc: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["salloc", "--job-name=torchweft", *requirements, "sh", "-c", _TELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this process, which gives it back
        )

    def wait(self, limit_s: float, say: Callable[[str], None]) -> tuple[str, str]:
        """Blocks until SLURM grants the allocation; returns the number of the job and its nodes.

        Args:
            limit_s: How long to wait, in seconds.
            say: Is told that the job waits in the queue, and why.

        Raises:
            LaunchError: SLURM refuses the allocation, or does not grant it in time.
        """
        salloc = self._salloc
        assert salloc is not None
        assert salloc.stdout is not None
        assert salloc.stderr is not None
        told, begin_s = b"", time.monotonic()
        queue = _Queue(say, begin_s)
        with selectors.DefaultSelector() as selector:
            for stream in (salloc.stdout, salloc.stderr):
                selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in told:
                for key, _ in selector.select(_SAY_AFTER_S / 4):
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is salloc.stdout:
                        told += data
                    else:
                        self._said += data
                if not selector.get_map():
                    raise LaunchError(f"SLURM refuses the allocation: {self._reason()}")
                queue.look(self._job())
                if time.monotonic() - begin_s > limit_s:
                    raise LaunchError(
                        f"SLURM has not granted the allocation within {limit_s:g} s "
                        f"({queue.reason or self._reason()}); ask for less, for another partition "
                        "(options=), or wait longer (timeout=)"
                    )
        self._is_granted = True
        job, _, nodes = told.decode().strip().partition(" ")
        return job, nodes

    def release(self) -> None:
        """Gives the allocation back, or leaves the queue; waits until that is done. Idempotent."""
        salloc, self._salloc = self._salloc, None
        if salloc is None:
            return
        if not self._is_granted:
            salloc.terminate()  # it still waits in the queue
        try:
            salloc.communicate(timeout=_RELEASE_S)
        except subprocess.TimeoutExpired:
            salloc.kill()
            salloc.communicate()

    def _job(self) -> str:
        found = _NUMBER.search(self._said.decode(errors="replace"))
        return "" if found is None else found[1]

    def _reason(self) -> str:
        lines = self._said.decode(errors="replace").split("\n")
        return " / ".join(filter(None, map(str.strip, lines)))


class _Queue:
    """Tells why a job waits in the queue, once for each reason."""

    def __init__(self, say: Callable[[str], None], begin_s: float) -> None:
        self._say = say
        self._next_s = begin_s + _SAY_AFTER_S
        self.reason = ""

    def look(self, job: str) -> None:
        """Asks SLURM now and then."""
        if not job or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _ASK_S
        with contextlib.suppress(LaunchError):  # the controller is busy, or the job has begun
            fields = fields_of(job)
            reason = fields.get("Reason", "")
            if fields.get("JobState") == "PENDING" and reason not in (self.reason, "None", ""):
                self.reason = reason
                self._say(f"SLURM job {job} waits in the queue ({reason}); Ctrl-C leaves it")
