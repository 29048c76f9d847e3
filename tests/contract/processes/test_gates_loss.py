"""If a worker dies while gates wait, the pass ends on all workers, and names it."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.contract.processes import autograd_functions
from tests.contract.processes import gate_functions as functions
from tests.contract.processes.gate_functions import leaf
from tests.contract.processes.test_autograd_loss import await_no_part
from torchweft import autograd, rpc
from torchweft.errors import BackwardLost, WorkerLost
from torchweft.launch import Nursery, cluster

FIRST, SECOND = "worker0", "worker1"


@pytest.mark.parametrize("doomed", [FIRST, SECOND])
def test_a_lost_worker_ends_gates_on_all_workers(nursery: Nursery, doomed: str) -> None:
    with (
        cluster(workers=2, nursery=nursery, check=False),
        autograd.context() as context_id,
    ):
        rpc.rpc_sync(FIRST, functions.begin_state)
        fed, total = leaf(2), torch.zeros((), dtype=torch.float64)
        for _ in range(2):
            fed = rpc.rpc_sync(FIRST, functions.advance, ("queueing", fed))
            fed = rpc.rpc_sync(SECOND, functions.halting_sine, (fed,)) + fed
            total = total + fed.sum()
        failures: list[BaseException] = []
        leader = threading.Thread(
            target=functions.backward_noting, args=(context_id, total, failures)
        )
        leader.start()
        functions.await_halt(SECOND, 1)
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(doomed, autograd_functions.die)
        leader.join(functions.PROMPT_S)
        assert not leader.is_alive()
        assert isinstance(failures[0], BackwardLost)
        assert failures[0].worker == doomed
        for worker in {"driver", FIRST} - {doomed}:
            await_no_part(worker)
