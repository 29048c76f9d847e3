"""Answers are sent in batches, which slow functions and calls back must not hold up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.processes import functions
from torchweft import rpc
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


def hold(gate: str) -> None:
    """Keeps its thread until the gate opens."""
    with open(gate, "rb"):
        pass


def test_a_slow_function_holds_back_no_answer(group: Cluster, tmp_path: Path) -> None:
    """The quick calls are in one batch with the slow one, in front of it and behind it."""
    for number in range(10):
        gate = tmp_path / f"gate{number}"
        os.mkfifo(gate)
        before = [rpc.rpc_async("worker1", functions.name_here) for _ in range(30)]
        slow = rpc.rpc_async("worker1", hold, args=(str(gate),))
        behind = [rpc.rpc_async("worker1", functions.name_here) for _ in range(30)]
        for call in before + behind:
            assert call.wait() == "worker1"
        assert not slow.done()
        gate.write_bytes(b"")
        slow.wait()


def test_a_call_back_holds_back_no_answer(group: Cluster) -> None:
    calls = [rpc.rpc_async("worker1", functions.bounce, args=(4, ["driver"])) for _ in range(50)]
    assert [call.wait() for call in calls] == [4] * 50
