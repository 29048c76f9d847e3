from __future__ import annotations

import pytest
import torch

from tests.unit.engine.channels.fake_gpu import UNTOUCHED, FakeGpu
from torchweft.engine.channels.device_copies import PageLock, PageLocks, Uploads
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


def to_device(uploads: Uploads, memory: memoryview, device: torch.device) -> torch.Tensor:
    [tensor] = uploads.to_devices([memory], [device])
    return tensor


def filled(pool: BufferPool, size_bytes: int) -> memoryview:
    memory = pool.lease(size_bytes)
    torch.frombuffer(memory, dtype=torch.uint8).random_(0, UNTOUCHED)
    return memory


def test_a_slab_is_locked_once_and_unlocked_before_it_is_unmapped(
    gpu: FakeGpu, pool: BufferPool, locks: PageLocks, uploads: Uploads
) -> None:
    memory = filled(pool, 3 * MIB)
    to_device(uploads, memory, DEVICE)
    assert gpu.registered == {address_of(memory): slab_size(3 * MIB)}
    to_device(uploads, memory, DEVICE)
    del memory
    again = filled(pool, 3 * MIB)
    to_device(uploads, again, DEVICE)
    assert len(gpu.registered) == 1
    del again
    pool.trim()
    assert gpu.registered == {}
    assert locks.reserved_bytes == 0


def test_other_memory_is_not_locked(gpu: FakeGpu, uploads: Uploads) -> None:
    memory = memoryview(bytearray(b"ab" * MIB))
    assert bytes(to_device(uploads, memory, DEVICE).numpy().data) == bytes(memory)
    assert bytes(to_device(uploads, memoryview(b"abc"), DEVICE).numpy().data) == b"abc"
    assert to_device(uploads, memoryview(b""), DEVICE).numel() == 0
    assert gpu.registered == {}


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


def test_copies_that_have_begun_are_waited_for_after_a_failure(
    gpu: FakeGpu, pool: BufferPool, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, made = gpu.new, list[torch.Tensor]()

    def fail_later(size_bytes: int, device: torch.device) -> torch.Tensor:
        if made:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(new(size_bytes, device))
        return made[0]

    monkeypatch.setattr(gpu, "new", fail_later)
    memory = filled(pool, 100_000)
    with pytest.raises(torch.OutOfMemoryError):
        uploads.to_devices([memory, memory], [DEVICE, DEVICE])
    assert gpu.waits == 1
    assert bytes(made[0].numpy().data) == bytes(memory)
