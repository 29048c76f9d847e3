"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.contract.processes.embedding_functions import (
    close_tables,
    configs_of,
    open_tables,
    train_step,
)
from tests.contract.processes.functions import options
from tests.contract.processes.observers import ANSWER_S, group_of
from tests.contract.processes.test_embedding_observed import SERVERS, TRAINERS
from torchweft import rpc
from torchweft.embedding import Plan, plan_tables
from torchweft.embedding.layout import pieces_of
from torchweft.launch import Cluster, Nursery
from torchweft.reports import NumberRow, NumberTable
from torchweft.rpc.observed import tell

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=3, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


def told(workers: Cluster) -> dict[tuple[str, str, tuple[str, ...]], NumberRow]:
    """Returns all rows, by worker, title and labels."""
    return {
        (report.worker, table.title, row.labels): row
        for report in group_of(workers).ask(ANSWER_S).reports
        for table in report.numbers
        for row in table.rows
    }


def test_an_observer_sees_bytes_shares_and_staleness_of_each_table_and_trainer(
    workers: Cluster,
) -> None:
    plan = plan_tables(configs_of(torch.float64), SERVERS, trainers=2)
    for trainer in TRAINERS:
        rpc.rpc_sync(trainer, open_tables, (plan, TRAINERS, "sgd"), kwargs={"staleness": 2})
    # The first is a step ahead in its second and third step.
    for me, step in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)):
        given = ("tables", me, step, torch.float64)
        rpc.rpc_sync(TRAINERS[me], train_step, given)
    found = told(workers)
    row = found["worker0", "embedding lookups", ("tables", "words")]
    assert row.histograms == {"staleness": {"0": 1, "1": 2}}
    assert found["worker1", "embedding lookups", ("tables", "words")].histograms == {
        "staleness": {"0": 3}
    }
    # Not looked up in the first step.
    pages = found["worker0", "embedding lookups", ("tables", "pages")]
    assert sum(pages.histograms["staleness"].values()) == 2
    numbers = row.numbers
    assert numbers["unique share"] == numbers["rows"] / numbers["ids"] < 1
    assert min(numbers["pulled bytes"], numbers["pushed bytes"]) > 0
    server = found["worker2", "embedding servers", ("tables",)]
    assert server.numbers["version"] == 3
    assert server.numbers["rows"] == sum(len(stack_rows) for stack_rows in rows_on(plan, "worker2"))
    assert server.histograms["staleness"] == {"0": 4, "1": 2}
    for trainer in TRAINERS:
        rpc.rpc_sync(trainer, close_tables, ("tables",))
    assert not [key for key in told(workers) if key[1] == "embedding lookups"]


def rows_on(plan: Plan, server: str) -> list[range]:
    return [each.piece.rows for each in pieces_of(plan.layout) if each.piece.server == server]


def test_a_component_that_fails_to_tell_spoils_no_report(workers: Cluster) -> None:
    def fail() -> NumberTable:
        raise ValueError("on purpose")

    end = tell(fail)
    me = rpc.get_worker_info().name
    assert (me, "numbers that could not be told", ("ValueError: on purpose",)) in told(workers)
    end()
    assert not [key for key in told(workers) if key[1].startswith("numbers that")]
