"""The one thread that looks at the clock: timeouts, ended references, stalled queues.

Its jobs for the reactor help stalled tasks, and arm connections left unarmed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from torchweft import knobs
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import log_exception

Job = Callable[[float], float]
"""Does what is due at a time; returns the time of its next call, infinity for never."""

_LONGEST_SLEEP_S = 1.0


class Timer:
    """One job of ``Timers``.

    Attributes:
        next_s: When the job will be called next, unless ``wake_by`` asks for an earlier time.
    """

    __slots__ = ("_timers", "job", "next_s")

    def __init__(self, timers: Timers, job: Job) -> None:
        self._timers = timers
        self.job = job
        self.next_s = 0.0

    def wake_by(self, due_s: float) -> None:
        """Has the job called at ``due_s`` at the latest. Safe in a finalizer."""
        if due_s < self.next_s:
            self._timers.ask(self, due_s)


class Timers:
    """Calls each job when it is due, and every job at least once a second.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._timers: list[Timer] = []
        self._asked: deque[tuple[Timer, float]] = deque()
        self._next_s = math.inf
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def add(self, job: Job) -> Timer:
        """Returns the timer of a new job, which is given the time of ``time.monotonic``."""
        timer = Timer(self, job)
        self._timers.append(timer)
        self.ask(timer, 0.0)
        return timer

    def start(self) -> None:
        """Starts the thread, which calls all jobs immediately."""
        self._thread.start()

    def ask(self, timer: Timer, due_s: float) -> None:
        """Has the job of ``timer`` called at ``due_s`` at the latest. Safe in a finalizer."""
        self._asked.append((timer, due_s))
        if due_s < self._next_s and not self._is_closing:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    def abandon(self) -> None:
        """Frees the descriptor in a forked process, which has no such thread."""
        self._is_closing = True
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)

    def close(self) -> None:
        """Ends the thread. Not from within a job."""
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._wake_fd)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        while not self._is_closing:
            # Accept every request meanwhile: it may be for a job that has been called already.
            self._next_s = math.inf
            while self._asked:
                timer, due_s = self._asked.popleft()
                timer.next_s = min(timer.next_s, due_s)
            now_s = time.monotonic()
            next_s = math.inf
            for timer in self._timers.copy():
                if timer.next_s <= now_s:
                    timer.next_s = math.inf  # As above.
                    timer.next_s = _called(timer.job, now_s)
                if timer.next_s < next_s:
                    next_s = timer.next_s
            self._next_s = next_s
            delay_s = next_s - time.monotonic()
            if delay_s > 0 and not self._asked and poller.poll(math.ceil(delay_s * 1e3)):
                os.eventfd_read(self._wake_fd)


def _called(job: Job, now_s: float) -> float:
    latest_s = now_s + _LONGEST_SLEEP_S
    try:
        due_s = job(now_s)
        # Not ``min``: a job that reckons with NaN would never be called again.
        return due_s if due_s < latest_s else latest_s
    except BaseException:  # The finalizer of a value that the job drops may run any code.
        log_exception("a timer's job failed; it is tried again in a second")
        return now_s + 1.0


def look_after(
    reactor: Reactor, timers: Timers, open_calls: Callable[[], int], mend: Callable[[], None]
) -> None:
    """Adds the timer jobs of a reactor, and sets the callbacks by which the reactor asks for them.

    Args:
        reactor: The reactor.
        timers: The timers that call the jobs.
        open_calls: Returns how many answers this worker waits for.
        mend: Continues what an interrupt of the main thread cut short; called once a second.
    """
    stall_s, rearm_s = knobs.STALL_S.get(), knobs.REARM_S.get()

    def help_stalled(now_s: float) -> float:
        return now_s + stall_s if reactor.help_if_stalled(open_calls()) else math.inf

    def arm_left(now_s: float) -> float:
        return now_s + rearm_s if reactor.arm_if_left(now_s - rearm_s) else math.inf

    def mend_all(now_s: float) -> float:
        mend()
        return math.inf

    stalls, arms = timers.add(help_stalled), timers.add(arm_left)
    timers.add(mend_all)
    reactor.on_queued = lambda: stalls.wake_by(time.monotonic() + stall_s)
    reactor.on_unarmed = lambda: arms.wake_by(time.monotonic() + rearm_s)
