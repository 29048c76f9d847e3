"""Workers, or the driver, that are killed while an asynchronous pipeline runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.contract.processes.functions import wait_until
from tests.contract.processes.pipeline_models import Descent
from torchweft import rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster
from torchweft.pipeline import Pipe, SchedulePipeDream

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
AT = 6
"""The minibatch at which a process is killed."""
QUICK_S = 30.0
"""Far less than the 60 s after which a stage gives up waiting for a value."""


def until_the_kill(pid: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields minibatches without end, and kills a process after some."""
    number = 0
    while True:
        if number == AT:
            os.kill(pid, signal.SIGKILL)
        yield torch.ones(4, 3), torch.ones(4, 3)
        number += 1


def pipe_on(workers: Sequence[str]) -> Pipe:
    stages = [nn.Linear(3, 3) for _ in workers]
    return Pipe(stages, workers, SchedulePipeDream(), nn.functional.mse_loss, optimizer=Descent)


def drive(workers: Sequence[str]) -> None:
    """Trains on workers, and is killed."""
    with pipe_on(workers) as pipe:
        for _ in pipe.run(until_the_kill(os.getpid())):
            pass


def count_runners() -> int:
    """Returns how many threads of pipelines run in this process."""
    return sum(each.name.startswith("weft-pipeline") for each in threading.enumerate())


def wait_for_no_runner(workers: Sequence[str]) -> None:
    def counts() -> list[int]:
        return [rpc.rpc_sync(name, count_runners) for name in workers]

    wait_until(lambda: not any(counts()), lambda: f"runners on {workers}: {counts()}")


@pytest.mark.parametrize("victim", ["worker0", "worker1", "worker2"])
def test_a_worker_is_killed(three: Cluster, victim: str) -> None:
    names = ["worker0", "worker1", "worker2"]
    others = [name for name in names if name != victim]
    with pipe_on(names) as pipe:
        before_s = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            list(pipe.run(until_the_kill(three.pids[victim])))
        assert caught.value.worker == victim
        with pytest.raises(WorkerLost):
            next(pipe.run(until_the_kill(-1)))
        # The others have ended the run: they serve another pipeline at once.
        with pipe_on(others) as second:
            assert len(list(second.run([(torch.ones(4, 3), torch.ones(4, 3))] * 5))) == 5
        assert time.monotonic() - before_s < QUICK_S
    wait_for_no_runner(others)


def test_the_driver_is_killed(three: Cluster) -> None:
    with pytest.raises(WorkerLost):
        rpc.rpc_sync("worker0", drive, args=(["worker1", "worker2"],))
    wait_for_no_runner(["worker1", "worker2"])
