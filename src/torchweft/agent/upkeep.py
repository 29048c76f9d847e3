"""What the housekeeper does for the reactor: stalled queues, connections left unarmed."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from torchweft import knobs

if TYPE_CHECKING:
    from torchweft.agent.agent import Agent


_MEND_S = 0.9
"""A little less than the longest sleep of the housekeeper."""


class Upkeep:
    """Jobs of the housekeeper, and the calls by which the reactor asks for them.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._stall_s = knobs.STALL_S.get()
        self._rearm_s = knobs.REARM_S.get()
        self._next_mending_s = 0.0

    def help_stalled(self, now_s: float) -> float:
        """Wakes another thread where the queue of tasks stands still; a job."""
        is_queued = self._agent.reactor.help_if_stalled(len(self._agent.calls))
        return now_s + self._stall_s if is_queued else math.inf

    def arm_left(self, now_s: float) -> float:
        """Arms connections that were left unarmed for too long; a job.

        Once a second, also those that the main thread has taken and was interrupted with.
        """
        if now_s >= self._next_mending_s:
            self._next_mending_s = now_s + _MEND_S
            self._agent.links.mend()
            self._agent.calls.mend()
        return now_s + self._rearm_s if self._agent.reactor.arm_if_left() else math.inf

    def look_soon(self) -> None:
        """Has ``help_stalled`` called in time."""
        housekeeper = self._agent.housekeeper
        if housekeeper is not None:
            housekeeper.nudge(time.monotonic() + self._stall_s)

    def arm_soon(self) -> None:
        """Has ``arm_left`` called in time; mostly it will be anyway."""
        housekeeper = self._agent.housekeeper
        if housekeeper is not None:
            due_s = time.monotonic() + self._rearm_s
            if due_s < housekeeper.next_s:
                housekeeper.nudge(due_s)
