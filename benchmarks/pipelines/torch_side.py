"""The same pipeline on torch.distributed.pipelining, in each of its processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining

from benchmarks.pipelines import model
from benchmarks.pipelines.cases import CHECKED_STEPS, MICROBATCHES, WORKERS, Case


class TorchPart:
    """The stages of one process.

    Args:
        case: Which pipeline.
        rank: Rank of the process.
    """

    def __init__(self, case: Case, rank: int) -> None:
        numbers = range(rank, case.n_stages, WORKERS)
        self._modules = [model.stage(case, number) for number in numbers]
        stages: list[Any] = [
            pipelining.PipelineStage(module, number, case.n_stages, torch.device("cpu"))
            for number, module in zip(numbers, self._modules, strict=True)
        ]
        self._schedule: Any
        if case.schedule == "interleaved":
            self._schedule = pipelining.ScheduleInterleaved1F1B(stages, MICROBATCHES, model.loss)
        else:
            kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
            self._schedule = kinds[case.schedule](stages[0], MICROBATCHES, model.loss)
        weights = [weight for module in self._modules for weight in module.parameters()]
        self._optimizer = torch.optim.SGD(weights, lr=model.LEARNING_RATE)
        self._inputs, self._target = model.batch(case)
        self._rank = rank

    def step(self) -> float | None:
        """Makes a step; returns its loss on the last rank."""
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(self._inputs)
            return None
        found: list[Tensor] = []
        self._schedule.step(target=self._target, losses=found, return_outputs=False)
        return torch.stack(found).mean().item()

    def losses(self) -> list[float | None]:
        """Trains for some steps; returns their losses on the last rank."""
        found = []
        for _ in range(CHECKED_STEPS):
            found.append(self.step())
            self._optimizer.step()
        return found
