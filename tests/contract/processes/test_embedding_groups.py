"""Groups of trainers that share pulls and sum their pushes: results, bytes, and lost workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes.embedding_functions import (
    close_tables,
    configs_of,
    open_tables,
    train,
    train_equal_rows,
    train_step,
)
from torchweft import rpc
from torchweft.embedding import Plan, TableConfig, TableWise, Wire, plan_tables
from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost
from torchweft.launch import Nursery

pytestmark = [
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
TRAINERS = ["worker0", "worker1", "worker2"]
SERVERS = ["worker3", "worker4"]
GROUPS = [["worker0"], ["worker1", "worker2"]]
STEPS = 6


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=5, nursery=nursery):
        yield


def plan_of(dtype: torch.dtype = torch.float64) -> Plan:
    places = {"users": TableWise(SERVERS[1]), "tags": TableWise(SERVERS[0])}
    return plan_tables(configs_of(dtype), SERVERS, trainers=len(TRAINERS), places=places)


def train_all(rule: str, **options: Any) -> list[Any]:
    futures = [
        rpc.rpc_async(
            name, train, (plan_of(), TRAINERS, me, rule, STEPS, torch.float64), kwargs=options
        )
        for me, name in enumerate(TRAINERS)
    ]
    return [future.wait() for future in futures]


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    for name, values in expected.items():
        assert float((found[name] - values).abs().max()) <= bound, name


def open_all(**options: Any) -> None:
    for call in [
        rpc.rpc_async(
            name, open_tables, (plan_of(), TRAINERS, "sgd"), kwargs={"aggregate": GROUPS, **options}
        )
        for name in TRAINERS
    ]:
        call.wait()


def step_of(trainer: int, step: int) -> Any:
    return rpc.rpc_async(TRAINERS[trainer], train_step, ("tables", trainer, step, torch.float64))


# First, as it makes its own group of workers.
@pytest.mark.parametrize("killed", [1, 2], ids=["aggregator", "member"])
def test_a_killed_trainer_of_a_group_is_named_to_all_that_wait_for_it(
    nursery: Nursery, killed: int
) -> None:
    with torchweft.cluster(workers=5, nursery=nursery, check=False):
        open_all()
        for call in [step_of(trainer, 0) for trainer in range(3)]:
            call.wait()
        survivors = [trainer for trainer in range(3) if trainer != killed]
        waiting = [step_of(trainer, 1) for trainer in survivors]
        os.kill(rpc.rpc_sync(TRAINERS[killed], os.getpid), signal.SIGKILL)
        for call in waiting:
            with pytest.raises(WorkerLost, match=f"'{TRAINERS[killed]}'") as caught:
                call.wait()
            assert caught.value.worker == TRAINERS[killed]
        with pytest.raises(WorkerLost, match=f"'{TRAINERS[killed]}'"):
            step_of(0, 1).wait()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("groups", [GROUPS, "host"], ids=["uneven", "host"])
@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_groups_train_as_trainers_alone_and_repeat_bit_by_bit(rule: str, groups: Any) -> None:
    expected = train_all(rule)
    first, second = (train_all(rule, aggregate=groups) for _ in range(2))
    for (weights, losses, staleness), (again, same, _), (others, other_losses, _) in zip(
        first, second, expected, strict=True
    ):
        check_same(weights, others, 1e-12)
        check_same(weights, again, 0.0)
        assert losses == same
        assert losses == pytest.approx(other_losses, abs=1e-12)
        assert set(staleness) == {0}


@pytest.mark.usefixtures("workers")
def test_groups_may_be_as_far_apart_as_the_bound() -> None:
    for _, _, staleness in train_all("sgd", aggregate=GROUPS, staleness=2):
        assert max(staleness) <= 2
    rounded = train_all("sgd", aggregate=GROUPS, wire=Wire(pulled="int8", pushed="fp16"))
    exact = train_all("sgd")
    for name, values in exact[0][0].items():
        assert float((rounded[0][0][name] - values).abs().max()) < 0.1, name


@pytest.mark.usefixtures("workers")
def test_two_trainers_of_a_host_send_half_of_the_bytes_if_their_rows_are_equal() -> None:
    plan = plan_tables([TableConfig("words", 3000, 64, "none")], [SERVERS[0]])
    moved, weights = [], []
    pair = TRAINERS[1:]
    for options in ({}, {"aggregate": "host"}):
        before = rpc.rpc_sync(SERVERS[0], rpc.traffic)
        futures = [
            rpc.rpc_async(name, train_equal_rows, (plan, pair, 8), kwargs=options) for name in pair
        ]
        weights.append([future.wait() for future in futures])
        after = rpc.rpc_sync(SERVERS[0], rpc.traffic)
        rows = 3000 * 64 * 4 * len(pair)  # each trainer reads the whole table at the end
        moved.append(sum(after) - sum(before) - rows)
    assert moved[1] <= 0.51 * moved[0], moved
    check_same(weights[1][0], weights[0][0], 1e-6)


@pytest.mark.usefixtures("workers")
def test_bad_groups_and_groups_that_differ_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no common steps"):
        train_all("sgd", aggregate="host", staleness=None)
    given = (plan_of(), TRAINERS, "sgd")
    rpc.rpc_sync(TRAINERS[0], open_tables, given, kwargs={"name": "differ"})
    with pytest.raises(ConfigurationError, match="differ in groups"):
        rpc.rpc_sync(
            TRAINERS[1], open_tables, given, kwargs={"name": "differ", "aggregate": GROUPS}
        )
    rpc.rpc_sync(TRAINERS[0], close_tables, ("differ",))


@pytest.mark.usefixtures("workers")
def test_a_member_that_makes_no_step_is_named() -> None:
    open_all(timeout=0.4)
    with pytest.raises(CallTimeout, match="tables 'tables' waits for the trainers 'worker2'"):
        step_of(1, 0).wait()
    for name in TRAINERS:
        rpc.rpc_sync(name, close_tables, ("tables",))
