"""The forwards and backwards of one worker's stages in its order, with nothing between workers."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.pipelines import model
from benchmarks.pipelines.cases import MICROBATCHES, WORKERS, Case
from benchmarks.pipelines.weft_side import schedule_of
from torchweft.pipeline.schedules import Action, Kind

STEPS = 10
"""Steps on one order, so that the order does not count."""


class ArithmeticPart:
    """The stages of one process, each with the same input and gradient again and again.

    Args:
        case: Which pipeline.
        rank: Rank of the process.
    """

    def __init__(self, case: Case, rank: int) -> None:
        table = schedule_of(case).table(WORKERS)
        self._row = table.rows[rank]
        self._last = table.n_stages - 1
        self._modules = {each: model.stage(case, each) for each in table.stages_of(rank)}
        inputs, target = model.batch(case)
        self._inputs = inputs.chunk(MICROBATCHES)
        self._targets = target.chunk(MICROBATCHES)
        self._gradient = torch.full((case.rows, case.width), 1e-3)
        self._outputs: dict[tuple[int, int], Tensor] = {}

    def step(self) -> None:
        """Makes some steps."""
        for _ in range(STEPS):
            for module in self._modules.values():
                module.zero_grad()
            for action in self._row:
                if action.kind is Kind.FORWARD:
                    self._forward(action)
                else:
                    self._backward(action)

    def _forward(self, action: Action) -> None:
        given = self._inputs[action.microbatch]
        if action.stage > 0:
            given = given.detach().requires_grad_()
        output = self._modules[action.stage](given)
        if action.stage == self._last:
            output = model.loss(output, self._targets[action.microbatch]) / MICROBATCHES
        self._outputs[action.stage, action.microbatch] = output

    def _backward(self, action: Action) -> None:
        output = self._outputs.pop((action.stage, action.microbatch))
        gradients = None if action.stage == self._last else [self._gradient]
        torch.autograd.backward([output], gradients)
