"""Decides which dead workers and groups are restarted, how often, and how soon.

A transient fault (a machine briefly without memory, an unavailable file system) should cost
seconds. A permanent fault (a wrong path in the script) should end the run with its message, not
fill a log for a night. So the waits grow, and the number of restarts within a time window is
limited: a run of weeks may lose a worker every day, and a run that cannot work is over after a
few attempts.

Nothing here knows a process or a clock: callers report deaths and the time.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchweft import knobs
from torchweft.errors import ConfigurationError

GROUP, WORKER = "group", "worker"
SCOPES = (GROUP, WORKER)

_DOUBLINGS = 30
"""More doublings would only affect waits that ``backoff_limit_s`` has capped long before."""


@dataclass(frozen=True)
class RestartPolicy:
    """The response to a worker's death: any end other than with exit code 0.

    With the scope ``"group"`` the others are ended and the whole group is restarted at a new
    meeting place: for groups of a known size, which no worker can join later. With ``"worker"``
    only the dead worker is restarted, under its name and rank: for open groups, where workers
    call ``init_rpc`` without a ``world_size``.

    The n-th wait in a row is ``backoff_s`` times 2 to the power of n - 1, at most
    ``backoff_limit_s``, times a random factor between one half and one. So workers that died of
    one cause do not come back at the same moment.

    Attributes:
        limit: Restarts of one worker, or of the group, within any ``window_s``; 0 for none. One
            more death ends the run.
        scope: What is restarted: ``"group"`` or ``"worker"``.
        backoff_s: The first wait, in seconds.
        backoff_limit_s: The longest wait, in seconds.
        window_s: Seconds after which a restart no longer counts; infinite for never.
        healthy_s: Seconds of running after which a worker or group counts as healthy: its next
            wait is the first again.
    """

    limit: int = 0
    scope: str = GROUP
    backoff_s: float = field(default_factory=knobs.RESTART_BACKOFF_S.get)
    backoff_limit_s: float = field(default_factory=knobs.RESTART_BACKOFF_LIMIT_S.get)
    window_s: float = field(default_factory=knobs.RESTART_WINDOW_S.get)
    healthy_s: float = field(default_factory=knobs.RESTART_HEALTHY_S.get)

    def check(self) -> None:
        """Raises ConfigurationError for the first invalid value."""
        if self.limit < 0:
            raise ConfigurationError(
                f"the number of restarts is {self.limit}; it must be 0, for none, or more"
            )
        if self.scope not in SCOPES:
            raise ConfigurationError(
                f"restarts have the scope {self.scope!r}; it must be one of {', '.join(SCOPES)}"
            )
        for name in ("backoff_s", "backoff_limit_s", "healthy_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigurationError(
                    f"{name} of the restarts is {value}; it must be a number of seconds, from 0 on"
                )
        if not self.window_s > 0:
            raise ConfigurationError(
                f"window_s of the restarts is {self.window_s}; it must be more than 0 seconds, "
                "or infinite, where all restarts of the run are to count"
            )


class Attempt(NamedTuple):
    """One permitted restart.

    Attributes:
        delay_s: How long to wait before it, in seconds.
        number: Its number among the restarts that count now, from 1.
    """

    delay_s: float
    number: int


class Attempts:
    """Counts the restarts of one worker, or of one group; callers pass the time.

    Args:
        policy: The limits.
        draw: Returns a random number from 0 to 1.

    Attributes:
        total: Restarts so far, including those that no longer count against the limit.
    """

    def __init__(self, policy: RestartPolicy, draw: Callable[[], float] = random.random) -> None:
        self._policy = policy
        self._draw = draw
        self._counted: deque[float] = deque()
        self._in_a_row = 0
        self._started_s = 0.0
        self.total = 0

    def started(self, now_s: float) -> None:
        """Records that the worker or group runs from now on."""
        self._started_s = now_s

    def next(self, now_s: float) -> Attempt | None:
        """Returns the restart after a death at ``now_s``, or None if the limit is reached."""
        policy = self._policy
        while self._counted and self._counted[0] <= now_s - policy.window_s:
            self._counted.popleft()
        if len(self._counted) >= policy.limit:
            return None
        if now_s - self._started_s >= policy.healthy_s:
            self._in_a_row = 0
        grown_s = policy.backoff_s * 2.0 ** min(self._in_a_row, _DOUBLINGS)
        delay_s = min(grown_s, policy.backoff_limit_s) * (0.5 + 0.5 * self._draw())
        self._in_a_row += 1
        self._counted.append(now_s)
        self.total += 1
        return Attempt(delay_s, len(self._counted))

    def withdraw(self) -> None:
        """Records that the last restart does not take place."""
        self.total -= 1


# The restarts of a run


class RestartPlan:
    """Keeps the restarts of one run.

    The caller reports deaths and the time, and starts the workers that ``take_due`` returns.

    Args:
        policy: What is restarted, how often and how soon.
        names: The workers' names.
        now_s: When they are started for the first time.
        draw: Returns a random number from 0 to 1.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        names: Sequence[str],
        now_s: float,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.policy = policy
        self._names = tuple(names)
        group = Attempts(policy, draw)
        self._attempts = {
            name: group if policy.scope == GROUP else Attempts(policy, draw) for name in names
        }
        self._due_s: dict[str, float] = {}
        self._of_group: Attempt | None = None
        for attempts in self._attempts.values():
            attempts.started(now_s)

    @property
    def is_of_group(self) -> bool:
        """Whether the workers are ended and started together."""
        return self.policy.scope == GROUP

    @property
    def is_regrouping(self) -> bool:
        """Whether a worker has died, and the others have to end before all are restarted."""
        return self._of_group is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a restart is pending."""
        return self.is_regrouping or bool(self._due_s)

    def count(self, name: str) -> int:
        """Returns how often a worker has been, or is about to be, restarted."""
        return self._attempts[name].total

    def total(self) -> int:
        """Returns the total number of restarts; a restart of the group counts once."""
        return sum(attempts.total for attempts in set(self._attempts.values()))

    def died(self, name: str, now_s: float) -> Attempt | None:
        """Records a worker's death; returns the restart, or None if the run is over.

        In the group scope, the wait begins with ``all_ended``.
        """
        attempt = self._attempts[name].next(now_s)
        if attempt is None:
            self.cancel()
        elif self.is_of_group:
            self._of_group = attempt
        else:
            self._due_s[name] = now_s + attempt.delay_s
        return attempt

    def all_ended(self, now_s: float) -> Attempt | None:
        """Records that all workers have ended; returns the restart that is now pending."""
        attempt, self._of_group = self._of_group, None
        if attempt is not None:
            self._due_s = dict.fromkeys(self._names, now_s + attempt.delay_s)
        return attempt

    def take_due(self, now_s: float) -> list[str]:
        """Returns the workers to start now, by rank."""
        due = [name for name in self._names if self._due_s.get(name, now_s + 1) <= now_s]
        for name in due:
            del self._due_s[name]
            self._attempts[name].started(now_s)
        return due

    def wait_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next restart is due; None if none is pending."""
        return max(0.0, min(self._due_s.values()) - now_s) if self._due_s else None

    def cancel(self) -> None:
        """Cancels all pending restarts."""
        waiting = self._names if self.is_regrouping else self._due_s
        for attempts in {self._attempts[name] for name in waiting}:
            attempts.withdraw()
        self._of_group = None
        self._due_s.clear()
