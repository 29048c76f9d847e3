"""Shared memory that is bounded or disabled, or that outlives its users."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import torchweft
import torchweft.memory
from tests.contract.processes import functions, shared_memory
from tests.contract.processes.functions import options, wait_until
from tests.contract.processes.shared_memory import checksum
from tests.processes import internals
from tests.processes.shared_memory_internals import (
    loans_of,
    meet,
    no_loans,
    statistics,
    tensor_of,
    usable_ways,
)
from torchweft import knobs, rpc
from torchweft.engine.worker.current import current
from torchweft.launch import Nursery

SIZE = 1 << 20


# Without some of the channels


@pytest.mark.parametrize("limit", ["0", "1000, and the least is 2097152"])
def test_a_worker_without_shared_memory_still_borrows(nursery: Nursery, limit: str) -> None:
    with (
        knobs.SHM_LIMIT_BYTES.override(int(limit.partition(",")[0])),
        torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()),
    ):
        sent = internals.make_tensor(SIZE)
        assert torch.equal(rpc.rpc_sync("worker0", functions.identity, args=(sent,)), sent)
        assert "shm" not in usable_ways("worker0")
        assert "shm" in rpc.rpc_sync("worker0", usable_ways, args=("driver",))
        with pytest.raises(MemoryError, match=f"WEFT_SHM_LIMIT_BYTES is {limit}$"):
            torchweft.memory.shared_empty(5)


@pytest.mark.parametrize("also", [[], ["cma"], ["cma", "striped"]])
def test_beyond_the_limit_tensors_take_the_next_way(nursery: Nursery, also: list[str]) -> None:
    with (
        knobs.SHM_LIMIT_BYTES.override(4 << 20),
        torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()),
    ):
        meet("worker0")
        internals.forbid("worker0", *also)
        for number in range(8):
            sent = tensor_of(SIZE, number)
            assert rpc.rpc_sync("worker0", shared_memory.keep, args=(sent,)) == number + 1
        assert statistics().loan_count == 4
        assert statistics().resident_bytes == 4 << 20
        for number in range(8):
            total = rpc.rpc_sync("worker0", shared_memory.checksum_of_kept, args=(number,))
            assert total == SIZE * number
        rpc.rpc_sync("worker0", shared_memory.drop_kept)
        no_loans("driver")


# Worker deaths


def test_what_a_killed_worker_had_is_lent_again(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        meet("worker0")
        for number in range(3):
            rpc.rpc_sync("worker0", shared_memory.keep, args=(tensor_of(SIZE, number),))
        assert statistics().loan_count == 3
        os.kill(group.pids["worker0"], signal.SIGKILL)
        wait_until(lambda: statistics().loan_count == 0, lambda: "a dead worker keeps its slabs")
        resident_bytes = statistics().resident_bytes
        meet("worker1")
        for number in range(3):
            rpc.rpc_sync("worker1", shared_memory.keep, args=(tensor_of(SIZE, number),))
        assert statistics().resident_bytes == resident_bytes


def test_what_a_killed_worker_sent_stays(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=1, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        received = rpc.rpc_sync("worker0", internals.make_tensor, args=(SIZE,))
        assert loans_of("worker0") == 1
        os.kill(group.pids["worker0"], signal.SIGKILL)
        wait_until(
            lambda: current().find("worker0").lost is not None,
            lambda: "the loss went unnoticed",
        )
        assert torch.equal(received, internals.make_tensor(SIZE))
    received.fill_(4)
    assert checksum(received) == 4 * SIZE


def test_shared_memory_has_the_same_bound(nursery: Nursery) -> None:
    with (
        knobs.SHM_LIMIT_BYTES.override(4 << 20),
        torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()),
    ):
        with pytest.raises(MemoryError, match="4194304 are allowed"):
            torchweft.memory.shared_empty(2 << 20)
        assert torchweft.memory.shared_empty(1 << 20).numel() == 1 << 20
        shared = torchweft.memory.share(torch.ones(100_000))
        meet("worker0")
        internals.forbid("worker0", "shm")
        rpc.rpc_sync("worker0", internals.fill, args=(shared, 3))
        assert checksum(shared) == 100_000, "where shared memory is forbidden it travels as a copy"
