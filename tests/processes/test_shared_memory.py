"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
import torchweft.memory
from tests.contract.processes import shared_memory
from tests.contract.processes.shared_memory import checksum
from tests.processes import shared_memory_internals
from tests.processes.shared_memory_internals import (
    loans_of,
    meet,
    no_loans,
    statistics,
    tensor_of,
    way_of,
)
from torchweft import knobs, rpc
from torchweft.engine.channels.shm import AT_ONCE_BYTES
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(autouse=True)
def _nothing_is_kept(group: Cluster) -> Iterator[None]:
    yield
    for name in group.names:
        rpc.rpc_sync(name, shared_memory.drop_kept)


def test_tensors_of_one_host_go_through_shared_memory(group: Cluster) -> None:
    meet("worker0")
    limits = knobs.INLINE_LIMIT_BYTES.get() + 1
    assert way_of("worker0", limits) == "shm"
    assert way_of("worker0", limits - 1) != "shm"
    assert rpc.rpc_sync("worker0", way_of, args=("driver", limits)) == "shm"


def test_the_sender_may_write_as_soon_as_the_call_is_made(group: Cluster) -> None:
    sent = tensor_of(AT_ONCE_BYTES)
    calls = []
    for value in range(1, 9):
        sent.fill_(value)
        calls.append(rpc.rpc_async("worker0", checksum, args=(sent,)))
    sent.fill_(99)
    assert torch.futures.wait_all(calls) == [AT_ONCE_BYTES * value for value in range(1, 9)]


def test_shared_memory_lives_as_long_as_anybody_has_it(group: Cluster) -> None:
    no_loans("driver", "worker0")
    shared = torchweft.memory.share(torch.ones(100_000))
    rpc.rpc_sync("worker0", shared_memory.keep, args=(shared,))
    resident_bytes = statistics().resident_bytes
    del shared
    assert statistics().loan_count == 1
    others = [torchweft.memory.share(torch.zeros(100_000)) for _ in range(3)]
    assert rpc.rpc_sync("worker0", shared_memory.checksum_of_kept, args=(0,)) == 100_000
    del others
    rpc.rpc_sync("worker0", shared_memory.drop_kept)
    no_loans("driver")
    assert statistics().resident_bytes >= resident_bytes
    assert not shared_memory_internals.pool().shared

    result = rpc.rpc_sync("worker0", shared_memory.make_shared, args=(10_000,))
    assert loans_of("worker0") == 1
    assert checksum(result) == 49_995_000
