"""How often the values between two stages on one host are copied, and what goes through sockets."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from torchweft import rpc
from torchweft.engine.channels import pull
from torchweft.errors import PipelineError
from torchweft.launch import Nursery
from torchweft.pipeline import Pipe, Schedule1F1B, SchedulePipeDream, ScheduleZBH1
from torchweft.rpc.worker import current_worker

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ["worker0", "worker1"]
ROWS, WIDTH = 4, 1 << 20
mse = nn.functional.mse_loss
SIZE = 4 * WIDTH
"""Bytes of a row, which is a micro-batch: 4 MiB in float32."""


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        for name in WORKERS:
            rpc.rpc_sync(name, count_copies)
        yield


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


@pytest.mark.parametrize("share_memory", [False, True])
def test_a_value_is_copied_once_between_two_stages_or_not_at_all(share_memory: bool) -> None:
    batch, n_steps = torch.ones(ROWS, WIDTH), 8
    with Pipe(
        [Scale(), Scale()], WORKERS, Schedule1F1B(ROWS), mse, share_memory=share_memory
    ) as pipe:
        for _ in range(2):  # Memory for large values is made when they are sent repeatedly.
            pipe.step(batch, batch)
        before = [rpc.rpc_sync(name, taken_counts) for name in WORKERS]
        n_shared = pipe.state_dict()["1.n_shared"]
        for _ in range(n_steps):
            pipe.step(batch, batch)
        after = [rpc.rpc_sync(name, taken_counts) for name in WORKERS]
        assert pipe.state_dict()["1.n_shared"] - n_shared == n_steps * ROWS
    # Activations go from worker0 to worker1, gradients back; only their senders copy.
    for (_, sent_before), (copies, sent_after) in zip(before, after, strict=True):
        if share_memory:
            # More values than ever before may be under way at once: the memory for each further one
            # is made after a copy.
            assert copies == [SIZE] * len(copies)
            assert len(copies) <= ROWS
        else:
            assert copies == [SIZE] * (n_steps * ROWS)
        assert sent_after - sent_before < SIZE // 100


class First(nn.Module):
    """Returns a value that needs a gradient, and one that needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = inputs + torch.tanh(self.linear(inputs))
        return hidden, hidden.detach().sigmoid()


class Second(nn.Module):
    """Changes the input that needs no gradient in place; it is this stage's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        scale = scale * 2.0 if scale.requires_grad else scale.mul_(2.0)
        return self.linear(hidden * scale)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), Second()]


def values(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [(Schedule1F1B(2), "never"), (Schedule1F1B(2), "always"), (ScheduleZBH1(2), "never")],
)
def test_shared_memory_changes_no_bit_of_gradients(schedule: Any, checkpoint: Any) -> None:
    found: list[list[Any]] = []
    for share_memory in (False, True):
        found.append([])
        with Pipe(
            stages(), WORKERS, schedule, mse, checkpoint=checkpoint, share_memory=share_memory
        ) as pipe:
            for step, rows in enumerate((512, 512, 256, 512)):  # Each shape has its own plan.
                pipe.step(values(rows, step), values(rows, step + 9))
                found[-1].append(pipe.gradients())
    for alone, shared in zip(*found, strict=True):
        assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_shared_memory_changes_no_bit_of_an_asynchronous_run() -> None:
    found: list[dict[str, Any]] = []
    batches = [(values(256, step), values(256, step + 9)) for step in range(5)]
    for share_memory in (False, True):
        with Pipe(
            stages(),
            WORKERS,
            SchedulePipeDream(weights="stashing"),
            mse,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            share_memory=share_memory,
        ) as pipe:
            for _ in pipe.run(batches):
                pass
            found.append(pipe.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Careless(nn.Module):
    """Changes its input in place where autograd does not see it."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            inputs.add_(1.0)
        return inputs * 2


def test_a_stage_that_changes_a_shared_value_is_named() -> None:
    wanted = r"it changed float32\[256, 256\] in place, which it shares with stage 0"
    with Pipe(
        [nn.Linear(256, 256), Careless()], WORKERS, Schedule1F1B(2), mse, share_memory=True
    ) as pipe:
        with pytest.raises(PipelineError, match=wanted) as caught:
            pipe.step(values(512, 0), values(512, 1))
        assert (caught.value.stage, caught.value.worker) == (1, "worker1")
