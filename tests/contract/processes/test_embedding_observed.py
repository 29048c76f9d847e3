"""Observers see what tables move, and how stale it is, by table and trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

import torchweft
from tests.command_line import said_by
from tests.contract.processes.embedding_functions import (
    configs_of,
)
from tests.contract.processes.functions import options
from tests.contract.processes.observers import group_of
from torchweft import rpc
from torchweft.embedding import SGD, Tables, plan_tables
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS, SERVERS = ["worker0", "worker1"], ["worker1", "worker2"]


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=3, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


def test_the_command_shows_the_tables_and_draws_the_staleness(workers: Cluster) -> None:
    tables = Tables(plan_tables(configs_of(torch.float64), SERVERS), staleness=None, name="seen")
    optimizer = tables.optimizer(SGD())
    for _ in range(3):
        tables({"words": torch.tensor([[1, 1, 2]])})["words"].sum().backward()
        optimizer.step()
    me = rpc.get_worker_info().name
    name = group_of(workers).name
    once = said_by("top", name, "--once", "--interval", "0.1")[1]
    assert "embedding lookups" in once
    (line,) = [each for each in once.splitlines() if each.split()[:3] == [me, "seen", "words"]]
    assert line.split()[3:6] == ["9", "6", "66.7%"]
    assert line.endswith("0: 100%")
    opened = said_by("top", name, "--once", "--interval", "0.1", "--worker", me)[1]
    assert "staleness of embedding lookups: seen, words" in opened
    assert "#" * 40 in opened
    found = json.loads(said_by("top", name, "--json", "--interval", "0.1")[1])["numbers"]
    (table,) = [
        each for each in found if (each["worker"], each["title"]) == (me, "embedding lookups")
    ]
    (row,) = [each for each in table["rows"] if each["labels"] == ["seen", "words"]]
    assert row["histograms"] == {"staleness": {"0": 3}}
    tables.close()
