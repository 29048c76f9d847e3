"""If a worker dies in a backward pass, the pass ends everywhere, and the error names the worker."""

from __future__ import annotations

import time
from typing import Any

import pytest

import torchweft
from tests import remains
from tests.contract.processes import autograd_functions as functions
from torchweft import rpc
from torchweft.errors import BackwardLost, WorkerLost
from torchweft.launch import Nursery, cluster

PROMPT_S = 5.0
FIRST, SECOND = "worker0", "worker1"

every_mode = pytest.mark.parametrize("mode", ["smart", "fast"])


def await_no_part(worker: str) -> None:
    deadline_s = time.monotonic() + PROMPT_S
    while (left := rpc.rpc_sync(worker, remains.of_autograd))["parts"] or left["led"]:
        assert time.monotonic() < deadline_s, f"the pass is not over on {worker}"
        time.sleep(0.01)


@every_mode
@pytest.mark.parametrize("doomed", [FIRST, SECOND])
def test_the_worker_that_dies_is_named(nursery: Nursery, doomed: str, mode: Any) -> None:
    with (
        cluster(workers=2, nursery=nursery, check=False),
        torchweft.autograd.context() as context_id,
    ):
        value = functions.parameter("x") * 1
        other = rpc.rpc_sync(FIRST, functions.layer, (value,))
        if doomed == FIRST:
            value = rpc.rpc_sync(FIRST, functions.fatal, (value,))
        else:
            value = rpc.rpc_sync(FIRST, functions.pass_to, (SECOND, functions.fatal, value))
        start_s = time.monotonic()
        with pytest.raises(BackwardLost, match="is lost") as caught:
            torchweft.autograd.backward(context_id, [(value + other).sum()], mode=mode)
        assert caught.value.worker == doomed
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerLost)
        assert (caught.value.since, caught.value.cause) == (cause.since, cause.cause)
        assert time.monotonic() - start_s < PROMPT_S
        for worker in {"driver", FIRST} - {doomed}:
            await_no_part(worker)


@every_mode
def test_a_worker_that_died_before_the_pass_is_named(nursery: Nursery, mode: Any) -> None:
    with (
        cluster(workers=2, nursery=nursery, check=False),
        torchweft.autograd.context() as context_id,
    ):
        value = rpc.rpc_sync(FIRST, functions.layer, (functions.parameter("x") * 1,))
        other = rpc.rpc_sync(SECOND, functions.layer, (value,))
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(FIRST, functions.die)
        start_s = time.monotonic()
        with pytest.raises(BackwardLost, match="is lost") as caught:
            torchweft.autograd.backward(context_id, [(value + other).sum()], mode=mode)
        assert caught.value.worker == FIRST
        assert time.monotonic() - start_s < PROMPT_S
        for worker in ("driver", SECOND):
            await_no_part(worker)


def test_the_pass_of_a_leader_that_dies_is_dropped(nursery: Nursery) -> None:
    with (
        cluster(workers=2, nursery=nursery, check=False),
        torchweft.autograd.context() as context_id,
    ):
        value = rpc.rpc_sync(SECOND, functions.layer, (functions.parameter("x") * 1,))
        broken = rpc.remote(FIRST, functions.fatal, (value,))
        loss = rpc.remote(FIRST, functions.total, (broken,))
        with pytest.raises(WorkerLost):
            loss.backward(context_id)
        for worker in ("driver", SECOND):
            await_no_part(worker)
