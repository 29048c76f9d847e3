"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.processes import internals
from torchweft import knobs, rpc
from torchweft.engine.wire import messages
from torchweft.engine.wire.messages import PAYLOAD_LIMIT_BYTES
from torchweft.errors import SerializationError
from torchweft.launch import Cluster
from torchweft.native import native
from torchweft.rpc import codec, serving, worker
from torchweft.rpc.serving import _MOST_USUAL
from torchweft.rpc.worker import current_worker

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")

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


LIMIT = 3


def limit_tensors(limit: int) -> int:
    """Sets how many tensors this worker accepts and sends in a message; returns the old limit."""
    tensor_messages = current_worker().tensor_messages
    before, tensor_messages._tensor_limit = tensor_messages._tensor_limit, limit
    return before


@pytest.fixture(params=["worker0", "driver"])
def limited(group: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The worker with the low limit."""
    before = rpc.rpc_sync(request.param, limit_tensors, args=(LIMIT,))
    yield request.param
    rpc.rpc_sync(request.param, limit_tensors, args=(before,))


def tensors(count: int, size: int) -> list[Any]:
    return [torch.full((size,), float(number)) for number in range(count)]


def make_with(value: Any) -> None:
    rpc.remote("worker0", functions.identity, args=(value,)).to_here()


@pytest.mark.parametrize("size", [25_600, 1 << 18], ids=["stream", "shm"])
def test_a_call_with_more_fails_and_others_do_not(limited: str, size: int) -> None:
    reference = rpc.remote("worker0", functions.Accumulator)
    for count in (LIMIT + 1, 100):
        with pytest.raises(SerializationError, match=f"at most {LIMIT}; stack some of them"):
            rpc.rpc_sync("worker0", functions.identity, args=(tensors(count, size),))
        with pytest.raises(SerializationError, match=f"at most {LIMIT}"):
            make_with([reference, *tensors(count, size)])
    fitting = rpc.rpc_sync("worker0", functions.identity, args=(tensors(LIMIT, size),))
    assert [float(tensor[0]) for tensor in fitting] == [0.0, 1.0, 2.0]
    assert reference.rpc_sync().add(1.0) == 1.0


def limit_payload(limit_bytes: int) -> None:
    """Sets how long the payload of this worker's messages may be.

    The limit of the twin in C is a constant; what exceeds that, it leaves to the plain twin.
    """
    messages.PAYLOAD_LIMIT_BYTES = limit_bytes
    codec.encode_whole = codec.plain_frame
    worker.native = None
    serving._MOST_USUAL = 0
    current_worker().usual.clear()


def lift_limit() -> None:
    """Restores the limit, and the twin."""
    messages.PAYLOAD_LIMIT_BYTES, worker.native = PAYLOAD_LIMIT_BYTES, native
    serving._MOST_USUAL = _MOST_USUAL
    if native is not None:
        codec.encode_whole = native.encode_call


@pytest.fixture(params=["worker0", "driver"])
def short(group: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The worker that sends only short payloads."""
    rpc.rpc_sync(request.param, limit_payload, args=(20_000,))
    yield request.param
    rpc.rpc_sync(request.param, lift_limit)


def fail_with(value: object) -> None:
    raise ValueError(value)


def test_a_payload_that_no_message_may_have_fails_its_call(short: str) -> None:
    reference = rpc.remote("worker0", functions.Accumulator)
    for value in (b"x" * 20_000, ["x" * 20_000], {"key": b"x" * 20_000}):
        for function in (functions.identity, fail_with):
            for argument in (value, [value, reference, torch.ones(1 << 15)]):
                with pytest.raises(SerializationError, match=r"beside its tensors, .* 20000 f"):
                    rpc.rpc_sync("worker0", function, args=(argument,))
    assert len(rpc.rpc_sync("worker0", functions.identity, args=(b"x" * 900,))) == 900
    assert reference.rpc_sync().add(1.0) == 1.0
