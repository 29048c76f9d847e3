"""Synchronous schedules in a V: worker ``w`` of ``p`` holds the stages ``w`` and ``2p - 1 - w``.

A micro-batch goes down the workers and comes back up, so the first worker also has the last stage.
It can begin with backward passes at once, and every worker keeps about as many activations as
every other. Backward passes are split where a worker would otherwise wait.

The rows are written as phases, with lane 0 for the stage ``w`` and lane 1 for ``2p - 1 - w``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torchweft.pipeline.schedules.actions import Action
from torchweft.pipeline.schedules.phases import Phase, write_row
from torchweft.pipeline.schedules.schedule import Schedule, in_order


@dataclass(frozen=True)
class _VShaped(Schedule):
    requires: ClassVar[str] = "at least 2p micro-batches"

    def _stages(self, worker: int, n_workers: int) -> tuple[int, ...]:
        return worker, 2 * n_workers - 1 - worker

    def _fix(self, n_workers: int) -> str:
        least = 2 * n_workers
        return f"pass {least} or more" if self.n_microbatches < least else ""

    def _row(self, worker: int, n_workers: int) -> tuple[Action, ...]:
        lanes = [
            in_order(stage, range(self.n_microbatches)) for stage in self._stages(worker, n_workers)
        ]
        return write_row(self._phases(worker, n_workers), *lanes)

    @abstractmethod
    def _phases(self, worker: int, n_workers: int) -> list[Phase]:
        """Returns the phases of one worker."""


@dataclass(frozen=True)
class ScheduleZBVZeroBubble(_VShaped):
    """Zero bubbles with the memory of 1F1B (ZB-V, Qi et al. 2024).

    With a forward pass, an input part and a weight part of one length each, a worker is idle only
    at both ends of the table, for ``p - 1`` of these lengths in all. Every worker keeps the
    activations of at most ``2p`` passes: as many bytes as the first worker of 1F1B, whose ``p``
    passes are of stages twice as long.

    The worker begins with forward passes, in lane 0 ahead by as many as run while a micro-batch
    goes down and comes back. Then it runs a forward pass, an input part and a weight part of each
    lane in turn. At the end weight parts are put off: other workers wait for the input parts.
    """

    def _phases(self, worker: int, n_workers: int) -> list[Phase]:
        after = n_workers - worker
        return [
            Phase(2 * after - 1, "F0"),
            Phase(worker, "F1 F0"),
            Phase(after, "F1 I1 W"),
            Phase(self.n_microbatches - n_workers, "F0 I0 W F1 I1 W"),
            Phase(worker, "I0 I1"),
            Phase(after, "I0 W"),
            Phase(2 * worker, "W"),
        ]


@dataclass(frozen=True)
class ScheduleDualPipeV(_VShaped):
    """The V-shaped half of DualPipe (DeepSeek-V3 2024), in the eight phases of its authors.

    In the long phase every forward pass of a lane is followed by a backward pass of the other lane,
    of another micro-batch: the messages of each travel while the other is computed. Every worker
    keeps the activations of at most ``2p + 1`` passes. Backward passes are whole, except at both
    ends, where weight parts fill idle time.
    """

    def _phases(self, worker: int, n_workers: int) -> list[Phase]:
        after = n_workers - 1 - worker
        pairs, odd = divmod(worker + 1, 2)
        return [
            Phase(2 * after, "F0"),
            Phase(worker + 1, "F0 F1"),
            Phase(after, "I1 W F1"),
            Phase(self.n_microbatches - 2 * n_workers + worker + 1, "F0 B1 F1 B0"),
            Phase(after, "B1 F1 B0"),
            Phase(pairs, "B1 B0"),
            Phase(odd, "B1 I0"),
            Phase(pairs, "I1 I0"),
            Phase(after, "W I0"),
            Phase(worker + 1, "W"),
        ]
