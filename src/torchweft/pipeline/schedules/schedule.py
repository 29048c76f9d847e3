"""The base of the synchronous schedules: micro-batches, workers, and which stages are where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torchweft.arguments import checked_int
from torchweft.errors import ConfigurationError
from torchweft.pipeline.schedules.actions import Action
from torchweft.pipeline.schedules.errors import ScheduleError
from torchweft.pipeline.schedules.phases import Lane
from torchweft.pipeline.schedules.table import Table

Placement = tuple[tuple[int, ...], ...]
"""For each worker the stages that it holds, in the order in which a micro-batch meets them."""


def checked_count(name: str, value: Any) -> int:
    """Returns an argument that counts something.

    Raises:
        ArgumentTypeError: It is not an integer.
        ConfigurationError: It is less than 1.
    """
    count = checked_int(name, value)
    if count < 1:
        raise ConfigurationError(f"{name} is {count}; pass 1 or more")
    return count


@dataclass(frozen=True)
class Schedule(ABC):
    """A synchronous schedule: one table for every batch, the optimizer steps after it.

    Args:
        n_microbatches: The number of micro-batches into which a batch is split.

    Raises:
        ConfigurationError: A number is less than 1.
    """

    n_microbatches: int

    requires: ClassVar[str] = "any number of micro-batches"
    """The condition on the number of micro-batches, where ``p`` is the number of workers."""

    def __post_init__(self) -> None:
        checked_count("n_microbatches", self.n_microbatches)

    def table(self, n_workers: int) -> Table:
        """Returns the schedule for a number of workers.

        Raises:
            ScheduleError: The schedule cannot have these numbers; the message names some that work.
            ConfigurationError: ``n_workers`` is less than 1.
        """
        placement = self.placement(n_workers)
        n_stages = 1 + max(stage for held in placement for stage in held)
        fix = self._fix(n_workers)
        if fix:
            raise ScheduleError(
                f"{type(self).__name__} on {n_workers} workers ({n_stages} stages) cannot have "
                f"{self.n_microbatches} micro-batches: it requires {self.requires}; {fix}",
                schedule=type(self).__name__,
                n_workers=n_workers,
                n_stages=n_stages,
                n_microbatches=self.n_microbatches,
            )
        rows = tuple(self._row(worker, n_workers) for worker in range(n_workers))
        return Table(type(self).__name__, n_stages, self.n_microbatches, rows)

    def placement(self, n_workers: int) -> Placement:
        """Returns the stages of each worker, in the order in which a micro-batch meets them.

        Raises:
            ConfigurationError: ``n_workers`` is less than 1, or no such number is possible.
        """
        checked_count("n_workers", n_workers)
        return tuple(self._stages(worker, n_workers) for worker in range(n_workers))

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        """Returns the stages of one worker."""
        return (worker,)

    def _fix(self, n_workers: int) -> str:
        """Returns advice if the schedule cannot have its number of micro-batches, else nothing."""
        return ""

    @abstractmethod
    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        """Returns the row of one worker."""


def in_order(stage: int, microbatches: Iterable[int]) -> Lane:
    """Returns the lane of one stage that takes up micro-batches in their order."""
    work = [(stage, microbatch) for microbatch in microbatches]
    return Lane(work, work)
