"""If a worker dies, or the driver is interrupted, while gates wait, the pass ends everywhere."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import remains
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


@pytest.mark.parametrize("in_context", [True, False])
def test_an_interrupt_while_a_gate_waits_ends_the_pass(nursery: Nursery, in_context: bool) -> None:
    """The worker halts while the main thread waits in a gate of its own graph."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def await_and_interrupt() -> None:
        functions.await_halt(FIRST, 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def loss_of(function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        sent = torch.tanh(weight * 2)
        received: Tensor = rpc.rpc_sync(FIRST, function, (sent,)) + sent
        return received.sum()

    def run(function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor | None:
        if not in_context:
            autograd.backward(loss_of(function, weight))
            return weight.grad
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(function, weight)])
            return autograd.get_gradients(context_id)[weight]

    with cluster(workers=2, nursery=nursery):
        before = signal.signal(signal.SIGUSR1, interrupt)
        helper = threading.Thread(target=await_and_interrupt)
        helper.start()
        begin_s = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                run(functions.halting_sine, leaf(1))
        finally:
            helper.join()
            signal.signal(signal.SIGUSR1, before)
        assert time.monotonic() - begin_s < functions.PROMPT_S
        rpc.rpc_sync(FIRST, functions.go_on)
        remains.await_no_autograd()
        weight, model = leaf(1), leaf(1)
        sent = torch.tanh(model * 2)
        (sent.sin() + sent).sum().backward()
        torch.testing.assert_close(run(functions.sine, weight), model.grad)
