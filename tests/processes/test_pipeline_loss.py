"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.functions import stop
from tests.contract.processes.pipeline_models import WIDTH
from tests.contract.processes.test_pipeline_loss import LIMIT_S, WORKERS, mse, three_stages
from torchweft import rpc
from torchweft.errors import PipelineError
from torchweft.launch import Nursery
from torchweft.pipeline import Pipe, Schedule1F1B
from torchweft.pipeline.runner import Runner

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


def pid() -> int:
    return os.getpid()


def resume_when_late(stopped: int) -> None:
    """Lets a stopped worker go on as soon as a stage of this worker has waited too long."""
    tell = Runner._too_late

    def too_late(self: Runner, key: Any) -> PipelineError:
        os.kill(stopped, signal.SIGCONT)
        return tell(self, key)

    Runner._too_late = too_late  # type: ignore[method-assign]


def test_a_stage_that_waits_in_vain_says_for_what(nursery: Nursery) -> None:
    with torchweft.cluster(workers=3, nursery=nursery):
        stopped = rpc.rpc_sync("worker1", pid)
        for other in ("worker0", "worker2"):
            rpc.rpc_sync(other, resume_when_late, (stopped,))
        inputs = torch.randn(8, 4, dtype=torch.float64)
        target = torch.randn(8, WIDTH, dtype=torch.float64)
        with Pipe(three_stages(), WORKERS, Schedule1F1B(4), mse, timeout=1.0) as pipe:
            resume = threading.Timer(LIMIT_S, os.kill, (stopped, signal.SIGCONT))
            stop(stopped)
            resume.start()
            try:
                with pytest.raises(PipelineError, match=r"waited 1 s for the \w+ of"):
                    pipe.step(inputs, target)
            finally:
                resume.cancel()
                resume.join()
                os.kill(stopped, signal.SIGCONT)
        with Pipe(three_stages(), WORKERS, Schedule1F1B(4), mse) as pipe:
            pipe.step(inputs, target)
