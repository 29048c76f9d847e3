"""Reports a run to its operator: which worker died, when and how, and the launcher's response."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchweft.launch.console import Console
from torchweft.launch.report import describe_death, describe_duration, shell_status
from torchweft.launch.restarts import GROUP, Attempt, RestartPolicy
from torchweft.launch.worker import WorkerExit

_DEATHS_LISTED = 10


class RunReport:
    """Writes one line for each event, at once, and a summary at the end.

    Args:
        console: Where the lines go.
        policy: The policy when a worker dies.
        names: The workers' names.
        speaker: The name at the start of each message.
        has_status: Whether the exit code of a worker that ends the run is that of the run.
    """

    def __init__(
        self,
        console: Console,
        policy: RestartPolicy,
        names: Sequence[str],
        speaker: str = "torchweft run",
        *,
        has_status: bool = True,
    ) -> None:
        self._has_status = has_status
        self._speaker = speaker
        self._console = console
        self._policy = policy
        self._names = names
        self._deaths: list[WorkerExit] = []
        self._awaited: set[str] = set()

    def say(self, text: str) -> None:
        """Writes one message of the launcher."""
        self._console.announce(f"{self._speaker}: {text}")

    def died(
        self,
        ended: WorkerExit,
        attempt: Attempt | None,
        others: int = 0,
        *,
        is_repeated: bool = False,
    ) -> None:
        """Reports that a worker has died, and what follows.

        Args:
            ended: How it ended.
            attempt: Its restart, or that of the group; None if the run is over.
            others: How many other workers run now.
            is_repeated: Whether the run is over because the worker failed at once, as before.
        """
        self._deaths.append(ended)
        if is_repeated:
            self.say(
                f"{describe_death(ended)}; it failed as the last time, at once, and is not "
                f"started again{self._ending_of_run(ended)}"
            )
        elif attempt is None:
            self._over(ended, others)
        elif self._policy.scope == GROUP:
            self.say(f"{describe_death(ended)}; {_ending(others)}")
        else:
            self._awaited.add(ended.name)
            self.say(f"{describe_death(ended)}; starting it again {self._when(attempt)}")

    def group_waits(self, attempt: Attempt) -> None:
        """Reports that all workers have ended, and when they are restarted."""
        self._awaited.update(self._names)
        self.say(f"starting {self._all()} again {self._when(attempt)}")

    def started(self, name: str, pid: int) -> None:
        """Reports that a restarted worker runs again, or all restarted workers of the group."""
        if name not in self._awaited:
            return
        self._awaited.discard(name)
        if self._policy.scope != GROUP or len(self._names) == 1:
            self.say(f"worker {name!r} runs again, with pid {pid}")
        elif not self._awaited:
            self.say(f"{self._all()} run again")

    def summarize(self, restarts: int) -> None:
        """Lists the deaths of a run with this number of restarts, if it is not 0."""
        if not restarts:
            return
        subject = "the group was" if self._policy.scope == GROUP else "workers were"
        times = {1: "once", 2: "twice"}.get(restarts, f"{restarts} times")
        lines = [f"{subject} started again {times}; these had died:"]
        if len(self._deaths) > _DEATHS_LISTED:
            lines.append(f"    ({len(self._deaths) - _DEATHS_LISTED} earlier ones)")
        lines += [f"    {describe_death(ended)}" for ended in self._deaths[-_DEATHS_LISTED:]]
        self.say("\n".join(lines))

    def _all(self) -> str:
        count = len(self._names)
        return "it" if count == 1 else f"{'both' if count == 2 else f'all {count}'} workers"

    def _over(self, ended: WorkerExit, others: int) -> None:
        limit = self._policy.limit
        if limit:
            spent = "the one restart" if limit == 1 else f"all {limit} restarts"
            verb = "is" if limit == 1 else "are"
            self.say(
                f"{describe_death(ended)}; {spent}{self._window()} {verb} used up"
                f"{self._ending_of_run(ended)}"
            )
        elif others:
            self.say(f"{describe_death(ended)}; {_ending(others)}")

    def _ending_of_run(self, ended: WorkerExit) -> str:
        code = shell_status(ended.exit_code)
        return f", ending the run with exit code {code}" if self._has_status else ""

    def _when(self, attempt: Attempt) -> str:
        return (
            f"in {attempt.delay_s:.1f} s, restart {attempt.number} of {self._policy.limit}"
            f"{self._window()}"
        )

    def _window(self) -> str:
        if math.isinf(self._policy.window_s):
            return ""
        return f" within {describe_duration(self._policy.window_s)}"


def _ending(others: int) -> str:
    if not others:
        return "no other worker runs"
    return "ending the other one" if others == 1 else f"ending the other {others}"
