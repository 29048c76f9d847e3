"""Functions that read internals; ``shared_memory.py`` in the contract has the others."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from tests.contract.processes.functions import name_here, wait_until
from tests.memory_counts import SharedCounts, first_for, shared_counts
from torchweft import rpc
from torchweft.engine.channels.shm import SharedMemory, SharedPool
from torchweft.engine.worker.current import current


def pool() -> SharedPool:
    made = current().channels.of(SharedMemory).pool
    assert made is not None
    return made


def statistics() -> SharedCounts:
    gc.collect()
    return shared_counts(pool())


def loans_of(name: str) -> int:
    """Returns how many slabs a worker has lent and not got back."""
    return rpc.rpc_sync(name, statistics).loan_count


def usable_ways(peer: str) -> set[str]:
    obstacles = current().find(peer).ways.obstacles()
    return {name for name, obstacle in obstacles.items() if not obstacle}


def meet(peer: str) -> None:
    """Calls a worker, and waits until it has told that it can read this worker's shared memory."""
    rpc.rpc_sync(peer, name_here)
    wait_until(lambda: "shm" in usable_ways(peer), lambda: f"no shared memory for {peer}")


def way_of(peer: str, size_bytes: int) -> str:
    return first_for(current().find(peer).ways, size_bytes)


def resources() -> tuple[int, int]:
    """Returns this process's resident bytes, and how many descriptors it has."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def no_loans(*names: str) -> None:
    wait_until(
        lambda: not any(map(loans_of, names)),
        lambda: f"still lent: {[(name, loans_of(name)) for name in names]}",
    )


def tensor_of(size_bytes: int, value: int = 1) -> torch.Tensor:
    return torch.full((size_bytes,), value, dtype=torch.uint8)
