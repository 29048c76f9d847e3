"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import pytest
import torch

from tests.contract.processes import functions, timing
from tests.contract.processes.functions import WORKER_THREADS, raised_by, wait_until
from tests.processes import internals, timing_internals
from torchweft import rpc
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


def test_no_timeout(group: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current(), "default_timeout_s", 0.05)
    with pytest.raises(CallTimeout):
        rpc.rpc_sync("worker0", functions.pass_gate, args=("endless",))
    call = rpc.rpc_async("worker0", functions.pass_gate, args=("endless", 4), timeout=0)
    reference = rpc.remote("worker1", functions.pass_gate, args=("endless", 5))
    with pytest.raises(CallTimeout):
        reference.to_here()
    for name in ("worker0", "worker1"):
        rpc.rpc_sync(name, functions.open_gate, args=("endless",), timeout=5)
    assert call.wait() == 4
    assert reference.to_here(timeout=0) == 5


def test_what_comes_too_late_leaves_nothing(group: Cluster) -> None:
    value = {"reference": rpc.RRef(functions.Tracked()), "tensor": torch.ones(3 << 20)}
    with pytest.raises(CallTimeout):
        rpc.rpc_sync("worker0", functions.pass_gate, args=("late", value), timeout=0.05)
    del value
    rpc.rpc_sync("worker0", functions.open_gate, args=("late",))
    wait_until(
        lambda: (
            rpc.rpc_sync("worker0", internals.held_for, args=("driver",)) == (0, 0)
            and internals.held_for("worker0") == (0, 0)
            and functions.count_tracked() == 0
        ),
        lambda: "a late answer has left something behind",
    )
    assert len(current().calls) == 0


def test_what_waited_for_too_long_is_not_begun(
    group: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if this worker had been stopped, and could not report that it gives up.
    post_ints = current().sender.post_ints

    def post_all_else(peer: Peer, kind: Kind, *values: int) -> None:
        if kind != Kind.CANCEL:
            post_ints(peer, kind, *values)

    monkeypatch.setattr(current().sender, "post_ints", post_all_else)
    holding = [
        rpc.rpc_async("worker0", timing_internals.hold_until_one_waits, args=("hold", 0.1))
        for _ in range(WORKER_THREADS)
    ]
    late = rpc.rpc_async("worker0", timing_internals.note_and_return, args=("late",), timeout=0.05)
    assert isinstance(raised_by(late.wait), CallTimeout)
    for future in holding:
        future.wait()
    assert rpc.rpc_sync("worker0", timing.noted, args=("late",)) == []
