"""Embedding tables whose trainers or servers die."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.embedding_functions import (
    configs_of,
    draw_batch,
    end_process,
    open_tables,
    train_step,
)
from torchweft import rpc
from torchweft.embedding import SGD, Tables, plan_tables
from torchweft.errors import WorkerLost
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS = ["worker0", "worker1"]
LIMIT_S = 5.0
"""On a busy machine; usually some 20 ms."""


def step_of(trainer: int, step: int) -> Any:
    return rpc.rpc_async(TRAINERS[trainer], train_step, ("tables", trainer, step, torch.float64))


def end(worker: str) -> None:
    with pytest.raises(WorkerLost):
        rpc.rpc_sync(worker, end_process)


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_a_lost_trainer_fails_the_steps_that_wait_for_it(
    nursery: Nursery, staleness: int | None
) -> None:
    with torchweft.cluster(workers=3, nursery=nursery, check=False):
        plan = plan_tables(configs_of(torch.float64), ["worker2"])
        for trainer in TRAINERS:
            given = (plan, TRAINERS, "sgd")
            rpc.rpc_sync(trainer, open_tables, given, kwargs={"staleness": staleness})
        for step in range(staleness or 0):  # These do not wait for the other trainer.
            step_of(0, step).wait()
        waiting = step_of(0, staleness or 0)
        if staleness is None:
            waiting.wait()
        began_s = time.monotonic()
        end("worker1")
        if staleness is None:
            step_of(0, 1).wait()
            return
        # One after the other: the server may note the loss later than the caller.
        for send in (lambda: waiting, lambda: step_of(0, staleness)):
            with pytest.raises(WorkerLost, match="'worker1'") as caught:
                send().wait()
            assert caught.value.worker == "worker1"
        assert time.monotonic() - began_s < LIMIT_S


def test_a_lost_server_is_named_by_lookup_and_step(nursery: Nursery) -> None:
    with torchweft.cluster(workers=2, nursery=nursery, check=False):
        tables = Tables(plan_tables(configs_of(torch.float64), ["worker0", "worker1"]))
        optimizer = tables.optimizer(SGD(lr=0.1))
        outputs = tables(draw_batch(0, 1, torch.float64).inputs)
        sum(each.sum() for each in outputs.values()).backward()  # type: ignore[union-attr]
        end("worker1")
        for action in (optimizer.step, lambda: tables(draw_batch(0, 2, torch.float64).inputs)):
            with pytest.raises(WorkerLost, match="'worker1'"):
                action()
        with pytest.raises(WorkerLost, match="'worker1'"):
            tables.close()


def test_a_lost_server_ends_a_stream_and_is_named(nursery: Nursery) -> None:
    with torchweft.cluster(workers=2, nursery=nursery, check=False):
        tables = Tables(plan_tables(configs_of(torch.float64), ["worker0", "worker1"]))
        batches = (draw_batch(0, step, torch.float64).inputs for step in itertools.count(1))
        with tables.stream(batches, 2) as stream:
            next(stream)
            end("worker1")
            with pytest.raises(WorkerLost, match="'worker1'"):
                for _ in stream:  # Some rows may be here already.
                    pass
            assert list(stream) == []
        with pytest.raises(WorkerLost, match="'worker1'"):
            tables.close()
