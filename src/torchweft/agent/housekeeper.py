"""The one thread that looks at the clock: timeouts, ended references, stalled queues."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable

from torchweft.agent.mishaps import log_mishap

Job = Callable[[float], float]
"""Does what is due at a time and returns when it wants to be called next; infinity for never."""

_LONGEST_SLEEP_S = 1.0


class Housekeeper:
    """Calls its jobs when they are due; an idle one wakes once a second.

    Args:
        name: Name of the thread.
        jobs: What to do; each is given the time of ``time.monotonic``.
    """

    def __init__(self, name: str, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.next_s = math.inf
        """When the jobs will be called next; earlier if nudged."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def nudge(self, due_s: float) -> None:
        """Sees to it that the jobs are called at ``due_s`` at the latest. Safe in a finalizer."""
        if due_s < self.next_s and not self._is_closing:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends the thread. Not from within a job."""
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        while not self._is_closing:
            # A nudge while the jobs are called may come too late for the one that it is meant for.
            self.next_s = math.inf
            now_s = time.monotonic()
            due_s = min(_called(job, now_s) for job in self._jobs)
            self.next_s = min(due_s, now_s + _LONGEST_SLEEP_S)
            delay_s = self.next_s - time.monotonic()
            if delay_s > 0 and poller.poll(math.ceil(delay_s * 1e3)):
                os.eventfd_read(self._wake_fd)


def _called(job: Job, now_s: float) -> float:
    try:
        return job(now_s)
    except BaseException:  # The end of a value that it lets go of may run any code.
        log_mishap("housekeeping failed; it is tried again in a second")
        return now_s + 1.0
