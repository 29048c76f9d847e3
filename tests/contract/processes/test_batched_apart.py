"""Batched calls in groups of their own: with a lost caller, and with strict workers."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import torchweft
from tests.contract.processes import batched_functions, functions
from tests.contract.processes.batched_functions import Server, await_waiting, statistics_of
from tests.contract.processes.functions import options
from torchweft import rpc
from torchweft.errors import NotAllowed
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")


def test_a_lost_caller_leaves_the_batch(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as cluster:
        server = rpc.remote("worker0", Server)
        rpc.rpc_async("worker1", batched_functions.wait_in_vain, (server,), timeout=0)
        await_waiting(server, Server.three, 1)
        os.kill(cluster.pids["worker1"], signal.SIGKILL)
        await_waiting(server, Server.three, 0)
        made = [server.rpc_async().three(torch.tensor(float(each))) for each in range(3)]
        assert [each.wait().item() for each in made] == [1.0, 2.0, 3.0]
        assert statistics_of(server, Server.three).sizes == {3: 1}


def test_a_strict_worker_batches_what_is_registered_and_exposed(nursery: Nursery) -> None:
    strict = options(strict=True, callables=(Server, functions.identity))  # type: ignore[arg-type]
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=strict):
        made = [
            rpc.rpc_async("worker0", batched_functions.registered, (torch.tensor(each),))
            for each in (1.0, 2.0)
        ]
        assert [each.wait().item() for each in made] == [10.0, 20.0]
        with pytest.raises(NotAllowed):
            rpc.rpc_sync("worker0", batched_functions.plain, (torch.ones(1),))
        server = rpc.remote("worker0", Server)
        found = batched_functions.call_six(server, 0, 6)
        assert [size for _, size in found] == [6] * 6
        with pytest.raises(NotAllowed):
            server.rpc_sync().three(torch.ones(1))
