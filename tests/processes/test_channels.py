"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.processes import internals
from torchweft import knobs, rpc
from torchweft.engine.codec.tensors import describe
from torchweft.engine.worker import tensor_messages
from torchweft.errors import SerializationError
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


@pytest.mark.parametrize("size_bytes", [8, INLINE + 8, PULLED + 8])
def test_received_tensors_are_writable_and_independent(group: Cluster, size_bytes: int) -> None:
    sent = bytes_of(size_bytes)
    assert rpc.rpc_sync("worker0", internals.fill, args=(sent, 7)) == 7
    assert torch.equal(sent, bytes_of(size_bytes))
    rpc.rpc_sync("worker0", internals.keep_tensor, args=("original", size_bytes))
    first = rpc.rpc_sync("worker0", functions.give, args=("original",))
    second = rpc.rpc_sync("worker0", functions.give, args=("original",))
    first.fill_(9)
    assert torch.equal(second, sent)
    second.fill_(1)
    assert torch.equal(rpc.rpc_sync("worker0", functions.give, args=("original",)), sent)
    rpc.rpc_sync("worker0", functions.drop, args=("original",))


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


def test_a_hundred_tensors_in_one_message(group: Cluster) -> None:
    sizes = [1, 100, INLINE + 1, 3, PULLED + 5]
    sent = [bytes_of(sizes[number % len(sizes)]) + number for number in range(100)]
    back = rpc.rpc_sync("worker0", functions.identity, args=(sent,))
    assert all(torch.equal(*pair) for pair in zip(sent, back, strict=True))


@pytest.mark.parametrize("size", [4, PULLED])
def test_views_of_one_storage_stay_views(group: Cluster, size: int) -> None:
    whole = torch.zeros(size, dtype=torch.float32)
    first, second = rpc.rpc_sync("worker0", functions.identity, args=((whole, whole[: size // 2]),))
    second.fill_(1)
    assert first.sum() == size // 2
    assert whole.sum() == 0


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


def test_many_threads_send_large_tensors(group: Cluster) -> None:
    def send(number: int) -> bool:
        sent = bytes_of(PULLED + number) + number
        names = ["worker0", "worker1"] if number % 2 else ["worker1", "worker0"]
        return torch.equal(functions.call_through(names, functions.identity, (sent,)), sent)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, range(24)))


def test_a_device_that_the_receiver_lacks(group: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = rpc.remote("worker0", functions.Tracked)
    with monkeypatch.context() as forged:
        missing = torch.device("cuda", 0)
        forged.setattr(
            tensor_messages, "describe", lambda tensors, _: describe(tensors, lambda _: missing)
        )
        sent = torch.zeros(PULLED)  # Too large for the message.
        with pytest.raises(SerializationError, match=r"on device cuda:0, but worker 'worker0' has"):
            rpc.rpc_sync("worker0", functions.collect, args=(sent, reference))
    assert rpc.rpc_sync("worker0", functions.add, args=(torch.ones(2), 1)).sum() == 4
