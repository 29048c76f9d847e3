"""Plans which workers are restarted, and when; knows no processes and no clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torchweft.launch.restarts import GROUP, Attempt, Attempts, RestartPolicy


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
