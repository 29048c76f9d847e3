"""Shared tensors that are page-locked for the GPU of this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import torchweft.memory
from tests.memory_counts import shared_counts
from tests.unit.engine.channels.fake_gpu import FakeGpu
from tests.unit.engine.worker.group import group_of
from torchweft import knobs
from torchweft.engine.channels.device_copies import PageLocks
from torchweft.engine.channels.memory import slab_size
from torchweft.engine.channels.shm import SharedMemory, SharedPool
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent
from torchweft.errors import ArgumentTypeError, ConfigurationError

MIB = 1 << 20


@pytest.fixture
def agent() -> Iterator[Agent]:
    with knobs.SHM_LIMIT_BYTES.override(16 * MIB), group_of(1) as (member,):
        current_agent.install(member.agent)
        try:
            yield member.agent
        finally:
            current_agent.install(None)


@pytest.fixture
def gpu(agent: Agent) -> FakeGpu:
    gpu = FakeGpu()
    agent.page_locks = PageLocks(8 * MIB, gpu)
    return gpu


@pytest.fixture
def pool(agent: Agent) -> SharedPool:
    assert agent.channels.of(SharedMemory).pool is not None
    return agent.channels.of(SharedMemory).pool


def test_a_shared_tensor_is_locked_until_its_memory_goes_back(
    gpu: FakeGpu, pool: SharedPool
) -> None:
    tensor = torchweft.memory.share(torch.arange(MIB), pin_memory=True)
    address = tensor.data_ptr()
    assert gpu.registered == {address: slab_size(8 * MIB)}
    assert tensor.tolist()[-1] == MIB - 1
    view = tensor[1:]
    del tensor
    gc.collect()
    pool.trim()
    assert address in gpu.registered
    del view
    gc.collect()
    pool.trim()
    assert gpu.registered == {}
    assert shared_counts(pool).resident_bytes == 0


def test_memory_beyond_the_limit_is_not_locked_and_given_back(
    gpu: FakeGpu, pool: SharedPool
) -> None:
    with pytest.raises(MemoryError, match="WEFT_PINNED_LIMIT_BYTES"):
        torchweft.memory.shared_empty(9 * MIB, dtype=torch.uint8, pin_memory=True)
    assert shared_counts(pool).idle_bytes == shared_counts(pool).resident_bytes
    gpu.obstacle = "operation not permitted (800)"
    with pytest.raises(MemoryError, match="operation not permitted"):
        torchweft.memory.shared_empty(1, pin_memory=True)


def test_without_a_gpu_the_error_says_so(gpu: FakeGpu) -> None:
    gpu.is_there = False
    with pytest.raises(ConfigurationError, match="leave pin_memory out"):
        torchweft.memory.shared_empty(1, pin_memory=True)
    with pytest.raises(ConfigurationError, match="this process has none"):
        torchweft.memory.pin(torch.ones(3))


def test_a_received_tensor_is_pinned_in_place(gpu: FakeGpu, agent: Agent) -> None:
    tensor = torch.arange(100)
    assert torchweft.memory.pin(tensor[50:])[0] == 50
    assert gpu.registered == {}, "the view was pinned, and has ended"
    assert torchweft.memory.pin(tensor) is tensor
    assert gpu.registered == {tensor.data_ptr(): 800}
    view, detached = tensor[1:], tensor.detach()
    del tensor
    gc.collect()
    assert len(gpu.registered) == 1
    del view
    gc.collect()
    assert gpu.registered == {}
    assert agent.page_locks.reserved_bytes == 0
    assert detached.tolist() == list(range(100))


@pytest.mark.parametrize(
    "value", [torch.empty(3, device="meta"), torch.eye(2).to_sparse(), "a tensor"]
)
def test_only_dense_tensors_on_the_host_can_be_pinned(gpu: FakeGpu, value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="pass a dense tensor on the CPU"):
        torchweft.memory.pin(value)  # type: ignore[arg-type]


def test_the_pool_s_end_ends_its_locks() -> None:
    gpu = FakeGpu()
    pool = SharedPool(4 * MIB)
    memory = pool.share(MIB, PageLocks(8 * MIB, gpu))
    assert len(gpu.registered) == 1
    pool.close()
    del memory, pool
    gc.collect()
    assert gpu.registered == {}
