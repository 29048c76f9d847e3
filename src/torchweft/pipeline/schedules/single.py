"""Synchronous schedules in which every worker holds one stage, or a replica of one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torchweft.pipeline.schedules.actions import Action
from torchweft.pipeline.schedules.phases import Phase, split_backward, write_row
from torchweft.pipeline.schedules.replicas import Seat, checked_replicas, seats_of
from torchweft.pipeline.schedules.schedule import Schedule, checked_count, in_order


@dataclass(frozen=True)
class ScheduleNaive(Schedule):
    """Takes one micro-batch at a time through all stages and back: one worker works at a time.

    Workers keep the activations of one micro-batch, and are idle for ``(p - 1) / p`` of the time.
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lane = in_order(worker, range(self.n_microbatches))
        return write_row([Phase(self.n_microbatches, "F0 B0")], lane)


@dataclass(frozen=True)
class ScheduleZBH1(Schedule):
    """1F1B with split backward passes, whose weight parts fill idle time (ZB-H1, Qi et al. 2023).

    With a forward pass, an input part and a weight part of one length each, every worker is idle
    for ``p - 1`` of these lengths, a third of 1F1B's. Every worker keeps the activations of up to
    ``p`` micro-batches, as the first worker of 1F1B does.
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lane = in_order(worker, range(self.n_microbatches))
        return write_row(split_backward(lane, n_workers - 1 - worker, worker), lane)


@dataclass(frozen=True)
class _Replicated(Schedule):
    """A schedule in which several workers may hold one stage.

    Args:
        n_microbatches: The number of micro-batches into which a batch is split.
        replicas: The number of workers for each stage, as ``(3, 1)``; one each if not given.
            Micro-batch ``b`` goes to replica ``b mod r`` of a stage with ``r`` of them.

    Raises:
        ConfigurationError: A number is less than 1.
    """

    replicas: tuple[int, ...] | None = None

    requires: ClassVar[str] = "a micro-batch for each replica of a stage"

    def __post_init__(self) -> None:
        checked_count("n_microbatches", self.n_microbatches)
        object.__setattr__(self, "replicas", checked_replicas(self.replicas))

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        return (self._seat(worker, n_workers).stage,)

    def _fix(self, n_workers: int) -> str:
        most = max(self.replicas or (1,))
        return f"pass {most} or more" if self.n_microbatches < most else ""

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        seat = self._seat(worker, n_workers)
        microbatches = range(seat.replica, self.n_microbatches, seat.n_replicas)
        warm_up = self._warm_up(seat, len(microbatches))
        phases = [Phase(warm_up, "F0"), Phase(len(microbatches), "F0 B0")]
        return write_row(phases, in_order(seat.stage, microbatches))

    def _seat(self, worker: int, n_workers: int) -> Seat:
        return seats_of(type(self).__name__, n_workers, self.replicas)[worker]

    @abstractmethod
    def _warm_up(self, seat: Seat, n_own: int) -> int:
        """Returns the number of forward passes before the first backward pass.

        Args:
            seat: The worker's part.
            n_own: The number of its micro-batches.
        """


@dataclass(frozen=True)
class ScheduleGPipe(_Replicated):
    """All forward passes, then all backward passes (GPipe, Huang et al. 2019).

    The idle share is ``(p - 1) / (m + p - 1)`` for ``m`` micro-batches on ``p`` workers with stages
    of equal cost. Every worker keeps the activations of all ``m``.
    """

    def _warm_up(self, seat: Seat, n_own: int) -> int:
        return n_own


@dataclass(frozen=True)
class Schedule1F1B(_Replicated):
    """Forward and backward passes in turn, after a few forward passes (Narayanan et al. 2019).

    The idle share is that of GPipe, ``(p - 1) / (m + p - 1)``; but worker ``w`` keeps at most
    ``p - w`` activations. Fewer micro-batches than workers work as well: then every worker that
    would begin with more forward passes than there are begins with all of them, as in GPipe.
    """

    def _warm_up(self, seat: Seat, n_own: int) -> int:
        return seat.warm_up
