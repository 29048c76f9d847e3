"""What a plan says that a step sends, and what the workers count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import torchweft
from tests.contract.processes.embedding_functions import counted_batch, train_counted
from torchweft import rpc
from torchweft.embedding import (
    ColumnWise,
    Plan,
    RowWise,
    TableConfig,
    TableWise,
    Touched,
    Wire,
    plan_tables,
    touched_shares,
)
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = [f"worker{number}" for number in range(4)]
STEPS = 5
ROWS = TableConfig("rows", 6000, 64, "none")
BAGS = TableConfig("bags", 6000, 64, "mean")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def plan_of(config: TableConfig, place: Any, trainers: Sequence[str], **options: Any) -> Plan:
    of_each = [
        touched_shares([config], [{config.name: counted_batch(config, me, step)}])[config.name]
        for me in range(len(trainers))
        for step in range(STEPS)
    ]
    touched = {config.name: Touched.mean(of_each)}
    places = {config.name: place}
    return plan_tables(
        [config], WORKERS, trainers=trainers, touched=touched, places=places, **options
    )


def received_by_all() -> int:
    """Returns the bytes that the workers have received from one another and from the test."""
    return sum(rpc.rpc_sync(name, rpc.traffic).bytes_received for name in WORKERS)


def count(plan: Plan, trainers: Sequence[str], **options: Any) -> float:
    """Returns the bytes of a step, of all trainers and servers together."""
    before = received_by_all()
    for call in [
        rpc.rpc_async(name, train_counted, (plan, trainers, me, STEPS), kwargs=options)
        for me, name in enumerate(trainers)
    ]:
        call.wait()
    return (received_by_all() - before) / STEPS


@pytest.mark.parametrize(("trainers", "largest"), [(4, 0.55), (2, 1.1)])
def test_trainers_that_are_servers_send_less_than_an_all_gather_of_sparse_gradients(
    trainers: int, largest: float
) -> None:
    names = WORKERS[:trainers]
    plan = plan_of(ROWS, RowWise(*names), names)
    # An all-gather: each trainer's row numbers, int64, and rows to each other trainer.
    rows = sum(
        len(counted_batch(ROWS, me, step).unique())
        for me in range(trainers)
        for step in range(STEPS)
    )
    gathered = (trainers - 1) * rows * (8 + 64 * 4) / STEPS
    placed = plan.placed["rows"]
    assert placed.gather_bytes == pytest.approx(gathered, rel=0.001)
    counted = count(plan, names)
    assert placed.server_bytes == pytest.approx(counted, rel=0.1)
    assert largest - 0.2 < counted / gathered <= largest


@pytest.mark.parametrize(
    ("config", "place", "trainers", "options"),
    [
        (ROWS, ColumnWise("worker2", "worker3"), 2, {}),
        (ROWS, RowWise("worker1", "worker3"), 2, {"wire": Wire("fp16", "int8")}),
        (BAGS, TableWise("worker3"), 2, {}),
        (BAGS, RowWise("worker0", "worker2"), 1, {"wire": Wire("fp16", "fp16")}),
    ],
    ids=["columns", "forms", "sums", "sums of two servers"],
)
def test_the_bytes_of_a_plan_are_those_of_a_run(
    config: TableConfig, place: Any, trainers: int, options: Any
) -> None:
    names = WORKERS[:trainers]
    plan = plan_of(config, place, names, **options)
    assert plan.placed[config.name].server_bytes == pytest.approx(
        count(plan, names, **options), rel=0.1
    )
