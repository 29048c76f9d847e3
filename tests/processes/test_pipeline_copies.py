"""How often the values between two stages on one host are copied, and what goes through sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.internal import overridden
from torchweft import knobs, rpc
from torchweft.engine.channels import pull
from torchweft.launch import Nursery
from torchweft.pipeline import Pipe, Schedule1F1B
from torchweft.rpc.worker import current_worker

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1"]
ROWS, WIDTH = 4, 1 << 20
mse = nn.functional.mse_loss
SIZE = 4 * WIDTH
"""Bytes of a row, which is a micro-batch: 4 MiB in float32."""
KEPT_S = 1e6
"""Memory for values is made beforehand and kept, however long the test takes."""


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with (
        knobs.POOL_IDLE_S.override(KEPT_S),
        torchweft.cluster(workers=2, nursery=nursery, env=overridden(POOL_IDLE_S=KEPT_S)),
    ):
        # A stage sends a value for each row; this process, inputs and targets.
        make_memory(2 * ROWS)
        for name in WORKERS:
            rpc.rpc_sync(name, make_memory, args=(ROWS,))
            rpc.rpc_sync(name, count_copies)
        yield


def make_memory(n_values: int) -> None:
    """Makes this worker's shared memory for the values that it sends in three steps.

    Where there is none for a value, its receiver copies it, as memory is made at the second such
    value in some seconds. How many are under way depends on how busy the machine is: values of the
    step before are freed once their receivers have run on. In 200 steps, those of two steps were
    under way at most.
    """
    for tensor in [torchweft.memory.shared_empty(WIDTH) for _ in range(3 * n_values)]:
        assert tensor.nbytes == SIZE


copied: list[int] = []
"""The bytes of each copy of this worker, into shared memory or out of another process."""


def count_copies() -> None:
    """Has this worker note its copies from now on."""
    copier: Any = current_worker().agent.channels.home.copier
    copy, read = copier.copy, pull.pull

    def counted_copy(source: int, target: int, size_bytes: int, keep: object) -> None:
        copied.append(size_bytes)
        copy(source, target, size_bytes, keep)

    def counted_pull(pid: int, address: int, into: memoryview) -> None:
        copied.append(into.nbytes)
        read(pid, address, into)

    copier.copy, pull.pull = counted_copy, counted_pull


def taken_counts() -> tuple[list[int], int]:
    """Returns the copies since the last call, and all bytes that were sent through sockets."""
    found = copied[:]
    copied.clear()
    return found, current_worker().agent.links.traffic().bytes_sent


class Scale(nn.Module):
    """Multiplies by a weight; notes whether its input lies in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("n_shared", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.n_shared += is_shared(inputs.data_ptr())
        return inputs * self.weight


def is_shared(address: int) -> bool:
    """Whether an address of this process is in an unnamed file that processes share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, end = line.split()[0].partition("-")
        if int(first, 16) <= address < int(end, 16):
            return "memfd" in line
    return False


def test_a_value_is_copied_once_between_two_stages() -> None:
    batch, n_steps = torch.ones(ROWS, WIDTH), 8
    with Pipe([Scale(), Scale()], WORKERS, Schedule1F1B(ROWS), mse) as pipe:
        pipe.step(batch, batch)
        before = [rpc.rpc_sync(name, taken_counts) for name in WORKERS]
        n_shared = pipe.state_dict()["1.n_shared"]
        for _ in range(n_steps):
            pipe.step(batch, batch)
        after = [rpc.rpc_sync(name, taken_counts) for name in WORKERS]
        assert pipe.state_dict()["1.n_shared"] - n_shared == n_steps * ROWS
    # Activations go from worker0 to worker1, gradients back; only their senders copy.
    for (_, sent_before), (copies, sent_after) in zip(before, after, strict=True):
        assert copies == [SIZE] * (n_steps * ROWS)
        assert sent_after - sent_before < SIZE // 100
