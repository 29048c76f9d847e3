"""Synchronous schedules that go round: worker ``w`` of ``p`` holds ``w``, ``w + p``, and so on.

With ``v`` stages for each worker a stage is short, so a worker waits a shorter time for its first
micro-batch: the idle time is divided by ``v``, and ``v`` times as many messages are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchweft.pipeline.schedules.actions import Action
from torchweft.pipeline.schedules.phases import Lane, Phase, split_backward, write_row
from torchweft.pipeline.schedules.schedule import Schedule, checked_count


@dataclass(frozen=True)
class _Looped(Schedule):
    """A schedule with several stages for each worker.

    Args:
        n_microbatches: The number of micro-batches into which a batch is split.
        stages_per_worker: The number of stages for each worker.

    Raises:
        ConfigurationError: A number is less than 1.
    """

    stages_per_worker: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_count("stages_per_worker", self.stages_per_worker)

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        return tuple(worker + n_workers * turn for turn in range(self.stages_per_worker))

    def _lane(self, worker: int, n_workers: int, n_together: int) -> Lane:
        """Returns the order of a worker that takes ``n_together`` micro-batches to each stage."""
        stages = self._stages(worker, n_workers)
        starts = range(0, self.n_microbatches, n_together)

        def order(stages: tuple[int, ...]) -> list[tuple[int, int]]:
            return [
                (stage, start + place)
                for start in starts
                for stage in stages
                for place in range(n_together)
            ]

        return Lane(order(stages), order(stages[::-1]))


@dataclass(frozen=True)
class ScheduleLoopedBFS(_Looped):
    """All forward passes, stage by stage, then all backward passes (Lamy-Poirier 2022).

    A worker finishes all micro-batches of one of its stages before it takes up the next stage
    (breadth first). The idle time is that of interleaved 1F1B; every worker keeps the activations
    of all micro-batches of all of its stages.
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lane = self._lane(worker, n_workers, self.n_microbatches)
        n_passes = len(lane.forward)
        return write_row([Phase(n_passes, "F0"), Phase(n_passes, "B0")], lane)


@dataclass(frozen=True)
class _Rounds(_Looped):
    """A schedule that takes micro-batches through the stages in rounds of ``p``, or a few more.

    A whole number of rounds of one size is enough, as in torch: 10 micro-batches on 4 workers are
    two rounds of 5. The known formula of the idle share holds for rounds of ``p``.
    """

    requires: ClassVar[str] = "a multiple of p, or at least of n_microbatches // p, micro-batches"

    def _fix(self, n_workers: int) -> str:
        fitting = [n for n in range(1, self.n_microbatches + n_workers + 1) if _fits(n, n_workers)]
        if self.n_microbatches in fitting:
            return ""
        fewer = max(n for n in fitting if n < self.n_microbatches)
        more = min(n for n in fitting if n > self.n_microbatches)
        return f"pass {fewer} or {more}"

    def _per_round(self, n_workers: int) -> int:
        return self.n_microbatches // max(1, self.n_microbatches // n_workers)


def _fits(n_microbatches: int, n_workers: int) -> bool:
    return n_microbatches % max(1, n_microbatches // n_workers) == 0


@dataclass(frozen=True)
class ScheduleInterleaved1F1B(_Rounds):
    """1F1B with several stages for each worker (Narayanan et al. 2021, Megatron-LM).

    With ``v`` stages for each of ``p`` workers, the idle share is ``b / (m + b)`` for
    ``b = (p - 1) / v`` and ``m`` micro-batches.
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        per_round = self._per_round(n_workers)
        lane = self._lane(worker, n_workers, per_round)
        n_passes = len(lane.forward)
        warm_up = (self.stages_per_worker - 1) * per_round + 2 * (n_workers - 1 - worker)
        return write_row([Phase(min(warm_up, n_passes), "F0"), Phase(n_passes, "F0 B0")], lane)


@dataclass(frozen=True)
class ScheduleInterleavedZeroBubble(_Rounds):
    """Interleaved 1F1B with split backward passes (ZB1P of torch, after Qi et al. 2023).

    Weight parts fill idle time. With a forward pass, an input part and a weight part of one length
    each, every worker is idle for ``p - 1`` of these lengths. A worker keeps the activations of at
    most ``v * p`` passes, in rounds of ``p``.
    """

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        per_round = self._per_round(n_workers)
        lane = self._lane(worker, n_workers, per_round)
        warm_up = (self.stages_per_worker - 1) * per_round + n_workers - 1 - worker
        return write_row(split_backward(lane, warm_up, delay=worker), lane)
