"""If a worker dies in a pass through gradients, the pass ends everywhere, and errors name it."""

from __future__ import annotations

import time
from typing import Any

import pytest

import torchweft
from tests import remains
from tests.contract.processes import autograd_functions
from tests.contract.processes import higher_order_functions as functions
from torchweft import rpc
from torchweft.errors import AutogradError, WorkerLost
from torchweft.launch import Nursery, cluster

PROMPT_S = 10.0
FIRST, SECOND = "worker0", "worker1"


def await_no_part(worker: str) -> None:
    deadline_s = time.monotonic() + PROMPT_S
    while (left := rpc.rpc_sync(worker, remains.of_autograd))["parts"] or left["led"]:
        assert time.monotonic() < deadline_s, f"the pass is not over on {worker}"
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["grad", "backward"])
@pytest.mark.parametrize("doomed", [FIRST, SECOND])
def test_the_worker_that_dies_in_the_second_pass_is_named(
    nursery: Nursery, doomed: str, way: str
) -> None:
    with (
        cluster(workers=2, nursery=nursery, check=False),
        torchweft.autograd.context() as context_id,
    ):
        value = functions.parameter("x") * 1
        other = rpc.rpc_sync(FIRST, functions.layer, (value,))
        arguments: tuple[Any, ...] = (SECOND, functions.fatal_at_second, value)
        if doomed == FIRST:
            result = rpc.rpc_sync(FIRST, functions.fatal_at_second, (value,))
        else:
            result = rpc.rpc_sync(FIRST, autograd_functions.pass_to, arguments)
        total = (result * other).sum()
        (slope,) = torchweft.autograd.grad(context_id, total, value, create_graph=True)
        start_s = time.monotonic()
        wanted = {"grad": [value], "backward": []}[way]
        start = torchweft.autograd.grad if wanted else torchweft.autograd.backward
        with pytest.raises(AutogradError, match="is lost") as caught:
            start(context_id, [slope.prod()], *wanted, create_graph=True)
        assert caught.value.worker == doomed
        assert isinstance(caught.value.__cause__, WorkerLost)
        assert time.monotonic() - start_s < PROMPT_S
        for worker in {"driver", FIRST} - {doomed}:
            await_no_part(worker)


def test_a_worker_that_dies_in_the_pass_of_a_callee_is_named(nursery: Nursery) -> None:
    with cluster(workers=2, nursery=nursery, check=False), torchweft.autograd.context():
        value = functions.parameter("x") * 1
        arguments = (SECOND, autograd_functions.fatal, value)
        start_s = time.monotonic()
        with pytest.raises(AutogradError, match="is lost") as caught:
            rpc.rpc_sync(FIRST, functions.gradient_through, arguments)
        assert caught.value.worker == SECOND
        assert time.monotonic() - start_s < PROMPT_S
        for worker in ("driver", FIRST):
            await_no_part(worker)


def test_the_graph_of_a_worker_that_is_lost_is_told_at_the_next_pass(nursery: Nursery) -> None:
    with (
        cluster(workers=2, nursery=nursery, check=False),
        torchweft.autograd.context() as context_id,
    ):
        value = functions.parameter("x")
        result = rpc.rpc_sync(FIRST, functions.layer, (value,))
        good = rpc.rpc_sync(SECOND, functions.layer, (value,))
        (slope,) = torchweft.autograd.grad(context_id, result.prod(), value, create_graph=True)
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(FIRST, autograd_functions.die)
        with pytest.raises(AutogradError, match="is lost") as caught:
            torchweft.autograd.grad(context_id, slope.sum(), value)
        assert caught.value.worker == FIRST
        # Passes that avoid the lost worker still work, as do passes through their gradients.
        (slope,) = torchweft.autograd.grad(context_id, good.prod(), value, create_graph=True)
        assert torchweft.autograd.grad(context_id, slope.sum(), value)[0].shape == (3,)
