"""The measured program: two workers, each with a part of a model, and one training step.

It records the end of its first stages, and the CPU time of both processes until then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.frame.api import PACKAGES, Api

WORKERS = 2


class Layer:
    """A part of the model, on its owner."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.module(inputs)

    def parameters(self) -> list[Any]:
        return [api.rpc.RRef(parameter) for parameter in self.module.parameters()]


def main() -> None:
    """Runs one of the workers."""
    options = api.rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'store'}")
    api.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    if rank == 0:
        stages: dict[str, tuple[float, float]] = {}
        cpu_s = api.rpc.rpc_sync("worker1", time.process_time)
        stages["first call"] = (time.monotonic(), cpu_s + time.process_time())
        train()
        now_s = time.monotonic()
        cpu_s = api.rpc.rpc_sync("worker1", time.process_time)
        stages["first step"] = (now_s, cpu_s + time.process_time())
        (folder / "stages").write_text(json.dumps(stages))
    api.rpc.shutdown()


def train() -> None:
    """Makes one optimizer step on both workers."""
    there, here = api.rpc.remote("worker1", Layer), Layer()
    parameters = here.parameters() + there.rpc_sync().parameters()
    optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with api.autograd.context() as context_id:
        loss = here.forward(there.rpc_sync().forward(torch.ones(2, 4))).sum()
        api.autograd.backward(context_id, [loss])
        optimizer.step(context_id)


rank = int(sys.argv[2])
folder = Path(os.environ["STARTUP_FOLDER"])
api = Api(PACKAGES[sys.argv[1]], rank, WORKERS)

if __name__ == "__main__":
    main()
