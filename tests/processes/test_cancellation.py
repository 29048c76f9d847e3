"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import remains
from tests.contract.processes import functions
from tests.contract.processes.functions import WORKER_THREADS, raised_by, wait_until
from tests.contract.processes.test_cancellation import noted, start
from tests.processes import timing_internals
from torchweft import rpc
from torchweft.errors import CallCancelled, CallTimeout
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(autouse=True)
def nothing_stays(group: Cluster) -> Iterator[None]:
    """Checks that no worker remembers a call that has ended."""
    yield
    for name in group.names:
        wait_until(
            lambda name=name: rpc.rpc_sync(name, remains.open_calls) == 0,  # type: ignore[misc]
            lambda name=name: f"{name} still knows calls",  # type: ignore[misc]
        )


@pytest.mark.parametrize("ending", ["cancelled", "timed out"])
def test_what_waits_is_not_begun(group: Cluster, ending: str) -> None:
    holding = [
        start("worker0", timing_internals.hold_until_cancelled, "hold " + ending, 2)
        for _ in range(WORKER_THREADS)
    ]
    # The first call's reference and tensor must be released; the second call needs no pickle.
    large, mine = torch.ones(1 << 19), rpc.RRef(1)
    queued = [
        rpc.rpc_async(
            "worker0", timing_internals.note_and_return, args=(ending, *values), timeout=0.05
        )
        for values in ((large, mine), (1,))
    ]
    if ending == "cancelled":
        assert all(future.cancel() for future in queued)
    errors = [raised_by(future.wait) for future in queued]
    assert {type(error) for error in errors} == {
        CallCancelled if ending == "cancelled" else CallTimeout
    }
    for future in holding:
        future.wait()
    assert noted("worker0", ending, 0) == []
    assert not queued[0].cancel()


def test_what_waits_for_a_value_waits_no_longer(group: Cluster) -> None:
    reference = rpc.remote("worker0", functions.pass_gate, args=("value", "made"))
    waiting = [reference.rpc_async(timeout=0).upper() for _ in range(3)]

    def parked() -> Any:
        return rpc.rpc_sync("worker0", timing_internals.parked, args=(reference,))

    wait_until(lambda: parked() == 3, lambda: f"{parked()} wait")
    waiting[0].cancel()
    wait_until(lambda: parked() == 2, lambda: f"{parked()} wait")
    rpc.rpc_sync("worker0", functions.open_gate, args=("value",))
    assert [future.wait() for future in waiting[1:]] == ["MADE", "MADE"]
