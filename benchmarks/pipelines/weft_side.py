"""A pipeline on Weft: the first worker drives it, and runs stages as well."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.pipelines import model
from benchmarks.pipelines.cases import CHECKED_STEPS, MICROBATCHES, Case
from torchweft.pipeline import Pipe, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torchweft.pipeline.schedules import Schedule

_SCHEDULES: dict[str, Schedule] = {
    "gpipe": ScheduleGPipe(MICROBATCHES),
    "1f1b": Schedule1F1B(MICROBATCHES),
    "interleaved": ScheduleInterleaved1F1B(MICROBATCHES),
}


def schedule_of(case: Case) -> Schedule:
    """Returns the schedule of a case."""
    return _SCHEDULES[case.schedule]


class WeftPipeline:
    """The pipeline at its driver.

    Args:
        case: Which pipeline.
        workers: The names of the workers.
    """

    def __init__(self, case: Case, workers: list[str]) -> None:
        self._inputs, self._target = model.batch(case)
        stages = [model.stage(case, number) for number in range(case.n_stages)]
        self._pipe = Pipe(stages, workers, schedule_of(case), model.loss)
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=model.LEARNING_RATE)

    def step(self) -> Tensor:
        """Makes a step; returns its loss."""
        self._optimizer.zero_grad()
        return self._pipe.step(self._inputs, self._target)

    def losses(self) -> list[float]:
        """Trains for some steps; returns their losses."""
        found = []
        for _ in range(CHECKED_STEPS):
            found.append(self.step().item())
            self._optimizer.step()
        return found
