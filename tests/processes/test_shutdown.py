"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.processes.functions import options
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.errors import DuplicateName
from torchweft.launch import Cluster, Nursery
from torchweft.launch.terms import Terms
from torchweft.rpc.node import current_node


def join_groups(rank: int, port: int) -> int:
    """Joins two groups, one after the other, at one address; rank 0 ends slowly."""
    for _ in range(2):
        at = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=20.0)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=at)
        if rank == 0:
            current_node().on_end["slowly"] = lambda: time.sleep(0.2)
        answer: int = rpc.rpc_sync(f"worker{1 - rank}", abs, args=(-rank,))
        rpc.shutdown()
    return answer


def test_the_next_group_does_not_meet_at_the_store_of_one_that_ends(warm: OpenWorkers) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for rank in range(2):
        warm.begin(f"worker{rank}", join_groups, rank, port)
    assert [warm.result(f"worker{rank}") for rank in range(2)] == [0, 1]


def test_two_workers_of_one_name(nursery: Nursery, capsys: pytest.CaptureFixture[str]) -> None:
    group = Cluster(Terms(["same"], "same", options(), nursery))
    error: BaseException | None = _error_of(group.start)
    assert error is not None
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__
    duplicate = [error for error in chain if isinstance(error, DuplicateName)]
    assert duplicate
    assert "ranks 0 and 1 both call themselves 'same'" in str(duplicate[0])
    capsys.readouterr()


def _error_of(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None
