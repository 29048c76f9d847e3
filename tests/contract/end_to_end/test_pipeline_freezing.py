"""What freezing saves: stages that sleep, with and without a rule that freezes layers."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.end_to_end.sleeping_stages import SleepOnWay
from torchweft.pipeline import Schedule1F1B
from torchweft.pipeline.elastic import ElasticPipe, FreezeFraction, Freezing, Samples

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2", "worker3"]
UNIT_S = 0.004
EPOCHS = 8
GAIN = 1.8


class SleepingBlock(nn.Module):
    """A layer whose forward takes one unit, and its backward two."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        passed: Tensor = SleepOnWay.apply(inputs + self.bias, UNIT_S, 2 * UNIT_S)
        return passed


def measure(freeze: Freezing | None) -> tuple[float, list[int]]:
    """Trains for some epochs; returns the time, and the number of stages of each."""
    model = nn.Sequential(*[SleepingBlock() for _ in range(12)])
    schedule = functools.partial(Schedule1F1B, 8)
    rows = torch.zeros(16, 4)
    lengths = []
    with ElasticPipe(model, WORKERS, schedule, nn.functional.mse_loss, freeze=freeze) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.step(rows[:8], rows[:8])  # Workers connect on first use.
        samples = Samples(16, 8)
        began_s = time.monotonic()
        while samples.epoch < EPOCHS:
            lengths.append(len(pipe.shape.replicas))
            for chosen in samples:
                optimizer.zero_grad()
                pipe.step(rows[chosen], rows[chosen], samples=chosen)
                optimizer.step()
            pipe.end_epoch()
        return time.monotonic() - began_s, lengths


@pytest.mark.thorough
def test_a_pipeline_that_freezes_is_faster() -> None:
    with torchweft.cluster(workers=4):
        usual_s, usual = measure(None)
        freezing_s, lengths = measure(FreezeFraction(1 / 3))
    print(f"\n{usual_s:.2f} s without, {freezing_s:.2f} s with: {usual_s / freezing_s:.2f}x")
    assert usual == [4] * EPOCHS
    assert lengths == [4, 4, 2, 2, 1, 1, 1, 1]
    assert usual_s > GAIN * freezing_s
