"""When the pushes of a step are applied, and when each is answered. No tensors, no I/O, no clock.

Rules of the file: a step is applied as a whole, once all trainers have pushed it, in the order of
the trainers. The *version* is the number of applied steps. With a bound s, a push of step t is
answered when the version is at least t + 1 - s. So a trainer is never more than s steps ahead of
the version. Without a bound (asynchronous), each push is a step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchweft.embedding.errors import StepError

P = TypeVar("P")
"""What a trainer pushes."""


@dataclass(frozen=True)
class Due(Generic[P]):
    """What follows from a push.

    Attributes:
        applied: The pushes of each step that is applied now, in the order of trainers.
        answered: Trainer and step of each push that is answered after that.
        failed: Trainer and step of each push that waits for a lost trainer.
    """

    applied: Sequence[Sequence[P]] = ()
    answered: Sequence[tuple[int, int]] = ()
    failed: Sequence[tuple[int, int]] = ()


class Steps(Generic[P]):
    """The steps of one server.

    Args:
        trainers: Names of the trainers.
        bound: The largest staleness, or None for the asynchronous mode.
        server: Name of the server, for messages.
        begin: The step that all trainers are in at first.
    """

    def __init__(
        self, trainers: Sequence[str], bound: int | None, server: str = "", begin: int = 0
    ) -> None:
        self._trainers = trainers
        self._bound = bound
        self._server = server
        self._next = [begin] * len(trainers)
        self._pushes: defaultdict[int, dict[int, P]] = defaultdict(dict)
        self._waiting: list[tuple[int, int]] = []
        self._limit: float = math.inf  # the version that can still be reached
        self.version = begin
        """Number of applied steps; in the asynchronous mode, of applied pushes."""
        self.staleness: Counter[int] = Counter()
        """How often each staleness was observed."""

    def step_of(self, trainer: int) -> int:
        """Returns the step that a trainer is in, which is the number of its pushes."""
        return self._next[trainer]

    @property
    def is_between(self) -> bool:
        """Whether no push waits for those of other trainers."""
        return self._bound is None or all(step == self.version for step in self._next)

    @property
    def may_be_ahead(self) -> bool:
        """Whether a trainer may go on before the others have pushed its step."""
        return bool(self._bound)

    def check_pull(self, trainer: int, step: int) -> None:
        """Checks and counts a pull for a step.

        Raises:
            StepError: The trainer is too far ahead, or not in that step.
        """
        self._check(trainer, step)
        if self._bound is None:
            return
        staleness = step - self.version
        if staleness > self._bound:
            # Its pushes are answered too late for that, unless it gave one up and goes on.
            name, late = self._trainers[trainer], ", ".join(map(repr, self.missing()))
            raise StepError(
                f"server {self._server!r} has applied {self.version} steps, and trainer {name!r} "
                f"pulls for step {step}: an earlier step of it has failed before {late} made it; "
                "close the tables on all trainers, and make them again",
                server=self._server,
                trainer=name,
                step=step,
                expected=self.version + self._bound,
            )
        self.staleness[staleness] += 1

    def push(self, trainer: int, step: int, push: P, seen: int) -> Due[P]:
        """Takes what a trainer pushes for a step.

        Args:
            trainer: Position of the trainer.
            step: The step.
            push: What is applied with the step.
            seen: The version that the trainer's pulls of this step saw.

        Raises:
            StepError: The trainer is not in that step.
        """
        self._check(trainer, step)
        self._next[trainer] += 1
        if self._bound is None:
            self.staleness[self.version - seen] += 1
            self.version += 1
            return Due([[push]], [(trainer, step)])
        self._pushes[step][trainer] = push
        self._waiting.append((trainer, step))
        return Due(self._complete(), self._taken(), self._failed())

    def lose(self, trainer: int) -> Due[P]:
        """Notes that a trainer is lost; fails the pushes that wait for its later ones."""
        if self._bound is not None:
            self._limit = min(self._limit, self._next[trainer])
        return Due(failed=self._failed())

    def count(self, staleness: Iterable[int]) -> None:
        """Counts the staleness of rows that were pulled ahead, and used in a step."""
        self.staleness.update(staleness)

    def _check(self, trainer: int, step: int) -> None:
        expected = self._next[trainer]
        if step != expected:
            name = self._trainers[trainer]
            raise StepError(
                f"server {self._server!r} is at step {expected} of trainer {name!r}, which sent "
                f"step {step}: an earlier step of it has failed on some server",
                server=self._server,
                trainer=name,
                step=step,
                expected=expected,
            )

    def _complete(self) -> list[list[P]]:
        applied = []
        while len(self._pushes.get(self.version, ())) == len(self._trainers):
            pushes = self._pushes.pop(self.version)
            applied.append([pushes[trainer] for trainer in sorted(pushes)])
            self.version += 1
        return applied

    def _needed(self, step: int) -> int:
        """Returns the version at which a push of a step is answered."""
        assert self._bound is not None
        return step + 1 - self._bound

    def _taken(self) -> list[tuple[int, int]]:
        """Removes and returns the pushes that can be answered."""
        taken = [each for each in self._waiting if self._needed(each[1]) <= self.version]
        self._waiting = [each for each in self._waiting if each not in taken]
        return taken

    def _failed(self) -> list[tuple[int, int]]:
        """Removes and returns the pushes that can never be answered."""
        failed = [each for each in self._waiting if self._needed(each[1]) > self._limit]
        self._waiting = [each for each in self._waiting if each not in failed]
        return failed

    def missing(self) -> list[str]:
        """Returns the trainers that have not pushed the step that is applied next."""
        return [
            name
            for name, step in zip(self._trainers, self._next, strict=True)
            if step <= self.version
        ]
