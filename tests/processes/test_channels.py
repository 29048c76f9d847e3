"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.processes import internals
from torchweft import knobs, rpc
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")

INLINE = knobs.INLINE_LIMIT_BYTES.default

PULLED = knobs.CMA_FROM_BYTES.default

SIZES = [0, 1, INLINE - 1, INLINE, INLINE + 1, PULLED - 1, PULLED, PULLED + 1, (16 << 20) + 3]


def bytes_of(size_bytes: int) -> torch.Tensor:
    return internals.make_tensor(size_bytes)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_sizes_around_every_limit(group: Cluster, size_bytes: int) -> None:
    sent = bytes_of(size_bytes)
    there_and_back = functions.call_through(["worker0", "worker1"], functions.identity, (sent,))
    assert torch.equal(there_and_back, sent)
    fetched = rpc.remote("worker1", internals.make_tensor, args=(size_bytes,)).to_here()
    assert torch.equal(fetched, sent)


def test_a_received_tensor_outlives_everything_else(group: Cluster) -> None:
    tensors = [
        rpc.rpc_sync("worker0", internals.make_tensor, args=(size_bytes,)) for size_bytes in SIZES
    ]
    views = [tensor[tensor.numel() // 2 :] for tensor in tensors]
    del tensors
    gc.collect()
    for _ in range(3):
        rpc.rpc_sync("worker0", internals.make_tensor, args=(PULLED,)).fill_(255)
    for view, size_bytes in zip(views, SIZES, strict=True):
        assert torch.equal(view, bytes_of(size_bytes)[size_bytes // 2 :])


def test_what_is_sent_is_let_go_of(group: Cluster) -> None:
    future = rpc.rpc_async("worker0", functions.describe_tensor, args=(bytes_of(4 * PULLED),))
    future.wait()
    references = [rpc.remote("worker0", internals.make_tensor, args=(PULLED,)) for _ in range(4)]
    assert all(reference.to_here().numel() == PULLED for reference in references)
    del references
    pairs = [("driver", "worker0"), ("worker0", "driver"), ("worker1", "worker0")]

    def nothing_is_held() -> bool:
        held = [rpc.rpc_sync(name, internals.held_for, args=(peer,)) for name, peer in pairs]
        return all(statistics == (0, 0) for statistics in held)

    wait_until(nothing_is_held, lambda: "tensors are held that everybody has")


def test_buffers_return_to_the_pool(group: Cluster) -> None:
    rpc.rpc_sync("worker1", functions.name_here)
    rpc.rpc_sync("worker1", internals.forbid, args=("driver", "shm"))
    before = internals.pool_statistics()
    received = [
        rpc.rpc_sync("worker1", internals.make_tensor, args=(2 * PULLED,)) for _ in range(3)
    ]
    assert internals.pool_statistics().leased_bytes >= before.leased_bytes + 6 * PULLED
    received.clear()
    assert internals.pool_statistics().leased_bytes == before.leased_bytes
