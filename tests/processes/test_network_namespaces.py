"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import far_workers as far
from tests.contract.processes.hosts import network
from tests.far_workers import far_workers
from tests.memory_counts import first_for
from tests.open_workers import OpenWorkers, WarmProcess
from torchweft import rpc
from torchweft.compat import rpc as compat_rpc
from torchweft.engine.channels.stripes import Stripes
from torchweft.engine.worker.current import current

SIZES = [1, 1 << 16, (1 << 19) + 1, 5 << 20, (64 << 20) + 3]


def call_all() -> dict[str, Any]:
    """Sends tensors of all sizes there and back; returns how they travelled."""
    peer = current().peers[1]
    rpc.rpc_sync(1, far.double, args=(torch.ones(1),))
    # Large tensors travel behind their messages until the peer has said what it can receive.
    while first_for(peer.ways, SIZES[-1]) != "striped":
        rpc.rpc_sync(1, far.double, args=(torch.ones(1),))
    wrong = []
    for size_bytes in SIZES:
        sent = (torch.arange(size_bytes, dtype=torch.int32) % 100).to(torch.uint8)
        if not torch.equal(rpc.rpc_sync(1, far.double, args=(sent,)), sent * 2):
            wrong.append(size_bytes)
    assert peer.link is not None
    data = current().channels.of(Stripes)._of(peer)
    assert data.sending is not None
    return {
        "wrong": wrong,
        "way": first_for(peer.ways, SIZES[-1]),
        "family": peer.link._socket.family.name,
        "data families": [sending._socket.family.name for sending in data.sending.connections],
        "received": data.arrivals.bytes_received,
    }


def test_tensors_cross_a_network(warm: OpenWorkers, tmp_path: Path) -> None:
    with network() as hosts, far_workers(warm, hosts, tmp_path) as workers:
        found = workers.do("worker0", call_all)
        for name in workers.names:
            workers.begin(name, far.leave)
        for name in workers.names:
            workers.result(name)
    assert found["wrong"] == []
    assert found["family"] == "AF_INET"
    assert found["way"] == "striped"
    assert found["data families"] == ["AF_INET"] * len(found["data families"])
    assert found["received"] == sum(size for size in SIZES if size >= 1 << 19)


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    with contextlib.closing(
        OpenWorkers(warm_process, far.__name__, compat_rpc.__name__)
    ) as workers:
        yield workers
