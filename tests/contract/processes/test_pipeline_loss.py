"""Pipelines whose workers die or stop in the middle of a step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import torchweft
from tests.contract.processes.pipeline_models import WIDTH, Failing, layers
from torchweft.errors import WorkerLost
from torchweft.launch import Nursery
from torchweft.pipeline import Pipe, Schedule1F1B

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1", "worker2"]
LIMIT_S = 5.0
"""On a busy machine; usually some 20 ms, and 60 s where a stage waits for a value."""
mse = nn.functional.mse_loss


def three_stages() -> list[nn.Module]:
    return [layers(1), Failing(), nn.Linear(WIDTH, WIDTH).double()]


def test_a_worker_killed_in_a_step_is_named_at_once(nursery: Nursery) -> None:
    with torchweft.cluster(workers=3, nursery=nursery, check=False):
        pipe = Pipe(three_stages(), WORKERS, Schedule1F1B(4), mse)
        inputs = torch.randn(8, 4, dtype=torch.float64)
        target = torch.randn(8, WIDTH, dtype=torch.float64)
        pipe.step(inputs, target)
        deadly = inputs.clone()
        deadly[-1] = 1e6 * torch.sign(pipe.state_dict()["0.0.weight"][0])
        began_s = time.monotonic()
        with pytest.raises(WorkerLost, match="'worker1'") as caught:
            pipe.step(deadly, target)
        assert caught.value.worker == "worker1"
        assert time.monotonic() - began_s < LIMIT_S
        with pytest.raises(WorkerLost, match="'worker1'"):  # And every later step, at once.
            pipe.step(inputs, target)
        pipe.close()
        # The others are free for another pipeline.
        with Pipe(layers(4), ["worker0", "worker2"], Schedule1F1B(4), mse) as again:
            again.step(inputs, target)
