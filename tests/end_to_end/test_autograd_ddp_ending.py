"""Deleting a DDP module does not hang the process, even after its process group is destroyed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchweft.autograd import data_parallel

data_parallel.watch()
sys.setswitchinterval(0.0005)

def compute():
    while True:
        time.sleep(0.0001)
        sum(range(200))

for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
for _ in range(150):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = DistributedDataParallel(torch.nn.Linear(2, 3))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    del module
print("ended", len(data_parallel.known_modules()))
"""


def test_modules_end_after_their_process_group() -> None:
    """Without ``watch`` this hangs within some 20 rounds, on PyTorch 2.13."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=50.0,
        check=True,
    )
    assert done.stdout == "ended 0\n"
