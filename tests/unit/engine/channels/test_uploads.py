from __future__ import annotations

import gc

import pytest
import torch

from tests.memory_counts import pool_counts
from tests.unit.engine.channels.fake_gpu import UNTOUCHED, FakeGpu
from torchweft.engine.channels.device_copies import LOCKED_FROM_BYTES, PageLock, PageLocks, Uploads
from torchweft.engine.channels.memory import BufferPool, address_of, slab_size

MIB = 1 << 20
DEVICE = torch.device("cpu")


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(16 * MIB)


@pytest.fixture
def locks(gpu: FakeGpu) -> PageLocks:
    return PageLocks(8 * MIB, gpu)


@pytest.fixture
def uploads(pool: BufferPool, locks: PageLocks) -> Uploads:
    return Uploads(pool, locks)


def to_device(
    uploads: Uploads, memory: memoryview | torch.Tensor, device: torch.device
) -> torch.Tensor:
    batch = uploads.batch()
    tensor = batch.add(memory, device)
    batch.wait()
    return tensor


def filled(pool: BufferPool, size_bytes: int) -> memoryview:
    memory = pool.lease(size_bytes)
    torch.frombuffer(memory, dtype=torch.uint8).random_(0, UNTOUCHED)
    return memory


def test_a_tensor_is_allocated_on_a_side_stream_and_used_on_the_current_one(
    gpu: FakeGpu, pool: BufferPool, uploads: Uploads
) -> None:
    memory = filled(pool, 100_000)
    tensor = to_device(uploads, memory, DEVICE)
    assert bytes(tensor.numpy().data) == bytes(memory)
    assert gpu.log == [
        "side stream",
        "new 100000",
        "copy 100000",
        "mark",
        "current stream",
        "use",
    ]
    assert gpu.waits == 1


def test_a_slab_is_locked_once_and_unlocked_before_it_is_unmapped(
    gpu: FakeGpu, pool: BufferPool, locks: PageLocks, uploads: Uploads
) -> None:
    memory = filled(pool, 3 * MIB)
    to_device(uploads, memory, DEVICE)
    assert gpu.registered == {address_of(memory): slab_size(3 * MIB)}
    to_device(uploads, torch.frombuffer(memory, dtype=torch.uint8), DEVICE)
    del memory
    again = filled(pool, 3 * MIB)
    to_device(uploads, again, DEVICE)
    assert len(gpu.registered) == 1
    del again
    pool.trim()
    assert gpu.registered == {}
    assert locks.reserved_bytes == 0


def test_memory_in_use_stays_locked_when_the_pool_is_trimmed(
    gpu: FakeGpu, pool: BufferPool, uploads: Uploads
) -> None:
    memory = filled(pool, MIB)
    to_device(uploads, memory, DEVICE)
    pool.trim()
    assert address_of(memory) in gpu.registered


@pytest.mark.parametrize("size_bytes", [LOCKED_FROM_BYTES - 1, 17 * MIB])
def test_small_memory_and_memory_that_the_pool_does_not_keep_is_not_locked(
    gpu: FakeGpu, pool: BufferPool, uploads: Uploads, size_bytes: int
) -> None:
    memory = filled(pool, size_bytes)
    assert bytes(to_device(uploads, memory, DEVICE).numpy().data) == bytes(memory)
    assert gpu.registered == {}


def test_other_memory_is_not_locked(gpu: FakeGpu, uploads: Uploads) -> None:
    memory = memoryview(bytearray(b"ab" * MIB))
    assert bytes(to_device(uploads, memory, DEVICE).numpy().data) == bytes(memory)
    assert bytes(to_device(uploads, memoryview(b"abc"), DEVICE).numpy().data) == b"abc"
    assert to_device(uploads, memoryview(b""), DEVICE).numel() == 0
    assert gpu.registered == {}


def test_a_lock_that_fails_only_costs_speed(
    gpu: FakeGpu, pool: BufferPool, locks: PageLocks, uploads: Uploads
) -> None:
    gpu.obstacle = "out of memory (2)"
    memory = filled(pool, MIB)
    assert bytes(to_device(uploads, memory, DEVICE).numpy().data) == bytes(memory)
    assert locks.reserved_bytes == 0
    assert locks.lock(1 << 40, MIB) == "out of memory (2)"


def test_no_more_than_the_limit_is_locked(
    gpu: FakeGpu, pool: BufferPool, locks: PageLocks, uploads: Uploads
) -> None:
    memories = [filled(pool, 5 * MIB) for _ in range(2)]
    for memory in memories:
        assert bytes(to_device(uploads, memory, DEVICE).numpy().data) == bytes(memory)
    assert list(gpu.registered) == [address_of(memories[0])]
    refused = locks.lock(1 << 40, 5 * MIB)
    assert not isinstance(refused, PageLock)
    assert "WEFT_PINNED_LIMIT_BYTES" in refused


def test_a_batch_waits_once_and_keeps_its_memory_until_then(
    gpu: FakeGpu, pool: BufferPool, uploads: Uploads
) -> None:
    batch = uploads.batch()
    memory = filled(pool, 2 * MIB)
    expected = bytes(memory)
    tensors = [batch.add(memory, DEVICE), batch.add(filled(pool, 100_000), DEVICE)]
    del memory
    gc.collect()
    assert pool_counts(pool).leased_count == 2
    assert tensors[0][0] == UNTOUCHED
    batch.wait()
    assert gpu.waits == 1
    assert bytes(tensors[0].numpy().data) == expected
    assert pool_counts(pool).leased_count == 0


def test_small_memory_is_taken_at_once(gpu: FakeGpu, pool: BufferPool, uploads: Uploads) -> None:
    batch = uploads.batch()
    memory = filled(pool, 1000)
    expected = bytes(memory)
    tensor = batch.add(memory, DEVICE)
    memory[:] = bytes(1000)
    batch.wait()
    assert bytes(tensor.numpy().data) == expected
    assert (gpu.log, gpu.waits) == (["upload 1000"], 0)


def test_a_batch_that_is_dropped_waits(gpu: FakeGpu, pool: BufferPool, uploads: Uploads) -> None:
    batch = uploads.batch()
    batch.add(filled(pool, 100_000), DEVICE)
    del batch
    assert gpu.waits == 1
    assert pool_counts(pool).leased_count == 0


def test_a_lock_ends_once(gpu: FakeGpu, locks: PageLocks) -> None:
    lock = locks.lock(1 << 40, MIB)
    assert isinstance(lock, PageLock)
    assert locks.reserved_bytes == MIB
    lock.release()
    lock.release()
    del lock
    assert (gpu.registered, locks.reserved_bytes) == ({}, 0)
