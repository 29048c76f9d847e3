"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import pytest

from tests.contract.processes import timing
from tests.contract.processes.functions import WORKER_THREADS, raised_by
from tests.processes import timing_internals
from torchweft import rpc
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.current import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


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
