"""Timer jobs for a reactor: they help stalled tasks, and arm connections left unarmed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torchweft import knobs
from torchweft.runtime.reactor import Reactor
from torchweft.runtime.timers import Timers

_MEND_S = 0.9
"""A little less than the longest sleep of the timers."""


class ReactorChecks:
    """Timer jobs for a reactor, and the callbacks by which the reactor requests them.

    Args:
        reactor: The reactor, whose callbacks are set here.
        timers: The timers, which are woken for the jobs.
        open_calls: Returns how many answers this worker waits for.
        mend: Continues what an interrupt of the main thread cut short; called about once a second.
    """

    def __init__(
        self,
        reactor: Reactor,
        timers: Timers,
        open_calls: Callable[[], int],
        mend: Callable[[], None],
    ) -> None:
        self._reactor = reactor
        self._timers = timers
        self._open_calls = open_calls
        self._mend = mend
        self._stall_s = knobs.STALL_S.get()
        self._rearm_s = knobs.REARM_S.get()
        self._next_mending_s = 0.0
        reactor.on_queued = self._look_soon
        reactor.on_unarmed = self.arm_soon

    def help_stalled(self, now_s: float) -> float:
        """Wakes another thread if the queue of tasks makes no progress; a job."""
        is_queued = self._reactor.help_if_stalled(self._open_calls())
        return now_s + self._stall_s if is_queued else math.inf

    def arm_left(self, now_s: float) -> float:
        """Arms connections that were left unarmed for too long; a job."""
        if now_s >= self._next_mending_s:
            self._next_mending_s = now_s + _MEND_S
            self._mend()
        return now_s + self._rearm_s if self._reactor.arm_if_left() else math.inf

    def _look_soon(self) -> None:
        self._timers.wake_by(time.monotonic() + self._stall_s)

    def arm_soon(self) -> None:
        """Has ``arm_left`` called in time; usually it is already due in time."""
        due_s = time.monotonic() + self._rearm_s
        if due_s < self._timers.next_s:
            self._timers.wake_by(due_s)
