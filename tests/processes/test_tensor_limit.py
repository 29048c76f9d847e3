"""Messages with more tensors or bytes than a worker accepts: the call fails, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.contract.processes import functions
from torchweft import rpc
from torchweft.engine.wire import messages
from torchweft.engine.wire.messages import PAYLOAD_LIMIT_BYTES
from torchweft.errors import SerializationError
from torchweft.launch import Cluster
from torchweft.native import native
from torchweft.rpc import codec, serving, worker
from torchweft.rpc.serving import _MOST_USUAL
from torchweft.rpc.worker import current_worker

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
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
