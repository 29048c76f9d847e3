"""Functions that read internals; ``functions.py`` in the contract has the others."""

from __future__ import annotations

import asyncio
import gc
import os
import time

import torch

from tests.contract.processes.functions import _gates, _gates_lock, pass_gate
from tests.memory_counts import HeldCounts, PoolCounts, first_for, held_counts, pool_counts
from torchweft.engine.channels import pull
from torchweft.engine.worker.current import current
from torchweft.free_threading import IS_FREE_THREADED, LONGEST_WAIT_S
from torchweft.rpc.node import Leaving


def count_at_gate(name: str) -> int:
    with _gates_lock:
        return len(_gates[name].waiting)


def fill(tensor: torch.Tensor, value: float) -> float:
    tensor.fill_(value)
    return float(tensor.flatten()[0])


def make_tensor(size_bytes: int) -> torch.Tensor:
    return torch.arange(size_bytes, dtype=torch.int64).to(torch.uint8)


def held_for(peer: str) -> HeldCounts:
    """Returns how much memory this worker holds until a peer has pulled it."""
    return held_counts(current().find(peer).held)


def pool_statistics() -> PoolCounts:
    gc.collect()
    if IS_FREE_THREADED:
        time.sleep(2 * LONGEST_WAIT_S)  # Threads that sleep release memory when they wake up.
    return pool_counts(current().pool)


def channel_to(peer: str) -> str:
    return first_for(current().find(peer).ways, 1 << 24)


def forbid(peer: str, *channels: str) -> None:
    """Stops this worker from sending tensors to a peer over the given channels."""
    for name in channels:
        current().find(peer).ways.give_up(name, "forbidden by a test")


def break_pulling() -> None:
    """Makes every read of another process's memory by this worker fail."""

    def refuse(pid: int, address: int, into: memoryview) -> None:
        raise OSError(1, "not permitted any more")

    pull.pull = refuse


def die_when_settling() -> None:
    """Makes this worker die when the group's shutdown is almost complete."""

    def die(leaving: Leaving, *_: object) -> None:
        os._exit(7)

    Leaving._settle = die  # type: ignore[method-assign]


async def block_event_loop() -> None:
    await asyncio.sleep(0)
    pass_gate("loop").wait()
