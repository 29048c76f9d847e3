"""Tensors in memory that two workers share: which worker may use it, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
import torchweft.memory
from tests.contract.processes import functions, shared_memory
from tests.contract.processes.shared_memory import (
    checksum,
)
from torchweft import rpc
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(autouse=True)
def _nothing_is_kept(group: Cluster) -> Iterator[None]:
    yield
    for name in group.names:
        rpc.rpc_sync(name, shared_memory.drop_kept)


# Memory that the user shares


def test_both_sides_of_a_shared_tensor_see_what_either_writes(group: Cluster) -> None:
    shared = torchweft.memory.share(torch.zeros(700, 100))
    assert (shared.shape, shared.dtype) == ((700, 100), torch.float32)
    for name in ("worker0", "worker1"):
        rpc.rpc_sync(name, shared_memory.keep, args=(shared,))
    rpc.rpc_sync("worker0", shared_memory.fill_kept, args=(0, 2.0))
    assert checksum(shared) == 2 * 70_000
    shared.fill_(3)
    assert rpc.rpc_sync("worker1", shared_memory.checksum_of_kept, args=(0,)) == 3 * 70_000
    returned = rpc.rpc_sync("worker0", shared_memory.fill_slice, args=(shared, 5.0))
    assert checksum(shared) == 3 * 70_000 + 2 * 200
    returned.zero_()
    assert checksum(shared) == 3 * 70_000 + 2 * 200, "what comes back is a copy"


def test_views_and_parts_of_shared_memory_are_shared(group: Cluster) -> None:
    shared = torchweft.memory.shared_empty(100, 10_000, dtype=torch.int64).fill_(1)
    rpc.rpc_sync("worker0", shared_memory.fill_slice, args=(shared[10:20], 7))
    expected = torch.ones(100, 10_000, dtype=torch.int64)
    expected[11:13] = 7
    assert torch.equal(shared, expected)
    rpc.rpc_sync("worker0", shared_memory.fill_slice, args=(shared[50], 4))
    assert shared[50].sum() == 9_998 + 2 * 4


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_shared_tensors_of_every_dtype(group: Cluster, dtype: torch.dtype) -> None:
    shared = torchweft.memory.share(torch.ones(3, 4).to(dtype))
    assert shared.dtype == dtype
    back = rpc.rpc_sync("worker0", functions.identity, args=(shared,))
    assert torch.equal(back.to(torch.complex64), shared.to(torch.complex64))
    assert torchweft.memory.shared_empty(0, 5, dtype=dtype).shape == (0, 5)


def test_shared_tensors_travel_as_copies_where_they_must(group: Cluster) -> None:
    received = rpc.rpc_sync("worker0", shared_memory.make_shared, args=(10_000,))
    rpc.rpc_sync("worker1", shared_memory.keep, args=(received,))
    received.zero_()
    assert rpc.rpc_sync("worker1", shared_memory.checksum_of_kept, args=(0,)) == 49_995_000
