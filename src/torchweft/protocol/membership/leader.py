"""Graceful shutdown: all workers stay until no worker needs another.

A worker that calls ``shutdown`` says so to rank 0, the leader, and goes on serving. When all
have said so, the leader finds out whether the group is quiet. One probe is not enough, since a
call may be on its way to a worker that was just seen idle. So the leader probes in rounds: the
group is quiet when all were idle in two consecutive rounds, without activity in between. While a
message is on its way, its sender is not idle: it waits for the answer. Then all drop their
references, and when the last owner has heard of it, the leader closes the group.

A worker that is lost on the way is left out, and named at the end.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Step(enum.IntEnum):
    """The step that a shutdown message announces. Its number is sent before the arguments."""

    READY = 1
    PROBE = 2
    REPORT = 3
    SETTLE = 4
    SETTLED = 5
    CLOSE = 6
    # In open groups, where workers leave one by one:
    LEAVING = 7
    NOTED = 8


class Send(NamedTuple):
    """An action: tell worker ``to`` a step, with its arguments."""

    to: int
    step: Step
    arguments: tuple[int, ...] = ()


class ProbeLater(NamedTuple):
    """An action: call ``probe_again`` after a short pause; the group is not quiet yet."""


class Closed(NamedTuple):
    """An action: the shutdown is complete; ``lost`` are the ranks that could not take part."""

    lost: tuple[int, ...]


Action = Send | ProbeLater | Closed


class Missing(NamedTuple):
    """The ``workers`` that a shutdown waits for, and ``what`` is true of them."""

    what: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One worker's answer to a probe: whether it is idle, and its activity count so far."""

    is_idle: bool
    activity: int


@dataclass(slots=True)
class Leader:
    """The leader's part. Its own worker takes part through the same events as all others.

    Args:
        workers: Ranks of the group, including its own.
    """

    workers: set[int]
    ready: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    round: int = 0
    phase: Step = Step.READY
    _reports: dict[int, Report] = field(default_factory=dict)
    _previous: dict[int, Report] = field(default_factory=dict)

    def worker_ready(self, worker: int) -> list[Action]:
        """Notes that a worker has called ``shutdown``."""
        self.ready.add(worker)
        return self._advance()

    def worker_reported(self, worker: int, probe_round: int, report: Report) -> list[Action]:
        """Takes a worker's answer to a probe; late answers to older rounds are ignored."""
        if self.phase is not Step.PROBE or probe_round != self.round:
            return []
        self._reports[worker] = report
        return self._advance()

    def worker_settled(self, worker: int) -> list[Action]:
        """Notes that a worker's references are dropped and all owners know."""
        self.settled.add(worker)
        return self._advance()

    def worker_lost(self, worker: int) -> list[Action]:
        """Continues without a lost worker."""
        if worker in self.workers:
            self.workers.discard(worker)
            self.lost.add(worker)
        return self._advance()

    def probe_again(self) -> list[Action]:
        """Starts the next round."""
        if self.phase is not Step.PROBE:
            return []
        self.round += 1
        self._previous, self._reports = self._reports, {}
        return self._tell_all(Step.PROBE, self.round)

    def missing(self) -> Missing:
        """Returns the workers that the shutdown waits for now, and why."""
        if self.phase is Step.READY:
            return Missing("had not called shutdown", tuple(sorted(self.workers - self.ready)))
        if self.phase is Step.PROBE:
            known = {**self._previous, **self._reports}
            busy = {worker for worker in self.workers & known.keys() if not known[worker].is_idle}
            unknown = self.workers - known.keys()
            if busy and unknown:
                both = tuple(sorted(busy | unknown))
                return Missing("had calls under way, or did not answer", both)
            if busy:
                return Missing("had calls under way", tuple(sorted(busy)))
            silent = self.workers - self._reports.keys()
            return Missing("did not answer", tuple(sorted(silent)))
        unsettled = self.workers - self.settled if self.phase is Step.SETTLE else set()
        return Missing("had not let go of all references", tuple(sorted(unsettled)))

    def _advance(self) -> list[Action]:
        if self.phase is Step.READY and self.workers <= self.ready:
            self.phase = Step.PROBE
            return self.probe_again()
        if self.phase is Step.PROBE and self.workers <= self._reports.keys():
            if not self._is_quiet():
                return [ProbeLater()]
            self.phase = Step.SETTLE
            return self._tell_all(Step.SETTLE)
        if self.phase is Step.SETTLE and self.workers <= self.settled:
            self.phase = Step.CLOSE
            lost = tuple(sorted(self.lost))
            return [*self._tell_all(Step.CLOSE, *lost), Closed(lost)]
        return []

    def _is_quiet(self) -> bool:
        return all(
            self._reports[worker].is_idle and self._previous.get(worker) == self._reports[worker]
            for worker in self.workers
        )

    def _tell_all(self, step: Step, *arguments: int) -> list[Action]:
        return [Send(worker, step, arguments) for worker in sorted(self.workers)]
