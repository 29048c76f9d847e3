from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.engine.channels.fake_gpu import UNTOUCHED, FakeGpu
from torchweft.engine.channels.device_copies import (
    CUT_FROM_BYTES,
    PART_BYTES,
    PageLocks,
    Part,
    Staging,
)

MIB = 1 << 20


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def staging(gpu: FakeGpu) -> Staging:
    return Staging(PageLocks(64 * MIB, gpu))


def noise(size_bytes: int) -> Tensor:
    return torch.randint(0, UNTOUCHED, (size_bytes,), dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy().data)


def test_all_copies_are_enqueued_before_one_wait(gpu: FakeGpu, staging: Staging) -> None:
    sent = [noise(MIB), noise(10), noise(2 * MIB)]
    memories = staging.to_host(sent)
    assert [bytes(memory) for memory in memories] == [bytes_of(tensor) for tensor in sent]
    assert [entry.split()[0] for entry in gpu.log if "pinned" not in entry] == ["copy"] * 3 + [
        "mark"
    ]
    assert gpu.waits == 1


def test_an_element_of_a_larger_tensor_and_an_empty_tensor(staging: Staging) -> None:
    column = torch.arange(6, dtype=torch.int16).view(3, 2)[1:2, 1]
    found, empty = staging.to_host([column, torch.empty(0)])
    assert np.frombuffer(found, np.int16).tolist() == [3]
    assert empty.nbytes == 0


def test_beyond_the_limit_other_memory_serves(gpu: FakeGpu) -> None:
    locks = PageLocks(MIB, gpu)
    sent = [noise(MIB), noise(MIB)]
    memories = Staging(locks).to_host(sent)
    assert [bytes(memory) for memory in memories] == [bytes_of(tensor) for tensor in sent]
    assert [entry for entry in gpu.log if "pinned" in entry] == [f"pinned {MIB}"]


def test_memory_counts_until_its_last_view_is_gone(gpu: FakeGpu) -> None:
    locks = PageLocks(64 * MIB, gpu)
    staging = Staging(locks)
    memory = staging.to_host([noise(MIB + 1)])[0]
    view = memory[5:10]
    del memory
    assert locks.reserved_bytes == 2 * MIB, "torch rounds its blocks to powers of two"
    del view, staging
    gc.collect()
    assert locks.reserved_bytes == 0


def test_parts_come_one_by_one(gpu: FakeGpu, staging: Staging) -> None:
    sent = [noise(CUT_FROM_BYTES + 3), noise(MIB), noise(CUT_FROM_BYTES)]
    copies = staging.begin(sent, cut=True)
    assert gpu.waits == 0
    parts = copies.parts(copies.memories[:2])
    first = next(parts)
    assert first == Part(0, 0, PART_BYTES)
    arrived = copies.memories[0]
    assert bytes(arrived[:PART_BYTES]) == bytes_of(sent[0][:PART_BYTES])
    assert arrived[PART_BYTES] == UNTOUCHED, "only what was waited for is there"
    rest = list(parts)
    assert rest == [
        Part(0, PART_BYTES, 2 * PART_BYTES),
        Part(0, 2 * PART_BYTES, CUT_FROM_BYTES + 3),
        Part(1, 0, MIB),
    ]
    copies.wait()
    assert [bytes(memory) for memory in copies.memories] == [bytes_of(tensor) for tensor in sent]
