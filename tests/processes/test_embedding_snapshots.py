"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.embedding_functions import (
    CONFIGS,
    check_same,
    close_tables,
    configs_of,
    open_tables,
    train_step,
)
from tests.contract.processes.test_embedding_snapshots import (
    SERVERS,
    SPARE,
    TRAINERS,
    on_all,
    on_first,
)
from tests.processes.embedding_internals import restore_tables, save_tables, set_rate, weights_of
from torchweft import rpc
from torchweft.checkpoint import list_snapshots
from torchweft.embedding import (
    SGD,
    ColumnWise,
    Plan,
    RowWise,
    StepError,
    TableConfig,
    Tables,
    TableWise,
    plan_tables,
)
from torchweft.embedding.configs import Place
from torchweft.embedding.server import host_of
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

NAMES = [each.name for each in CONFIGS]

BEFORE, LOST, STEPS = 2, 1, 5


def plan_on(servers: list[str], places: dict[str, Place] | None = None) -> Plan:
    return plan_tables(configs_of(torch.float64), servers, trainers=2, places=places or {})


def open_on(servers: list[str], rule: str, places: Any = None, **options: Any) -> None:
    on_all(open_tables, plan_on(servers, places), TRAINERS, rule, **options)


def make_steps(first: int, end: int) -> list[list[float]]:
    losses = []
    for step in range(first, end):
        futures = [
            rpc.rpc_async(name, train_step, ("tables", me, step, torch.float64))
            for me, name in enumerate(TRAINERS)
        ]
        losses.append([future.wait() for future in futures])
    return losses


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Any:
    with torchweft.cluster(workers=5, nursery=nursery):
        yield


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("rule", "servers", "places"),
    [
        ("adam", [SERVERS[1]], {}),
        ("adam", [*SERVERS, SPARE], dict.fromkeys(NAMES, RowWise(SPARE, *SERVERS))),
        ("adam", SERVERS, dict.fromkeys(NAMES, ColumnWise(SERVERS[1], SERVERS[0]))),
        ("row-wise", [*TRAINERS, SPARE], dict.fromkeys(NAMES[1:], TableWise(SPARE))),
    ],
    ids=["one server", "three by row", "by column", "whole, and trainers as servers"],
)
def test_rows_and_state_go_to_other_servers_and_shards_and_back(
    tmp_path: Path, rule: str, servers: list[str], places: Any
) -> None:
    open_on(SERVERS, rule)
    make_steps(0, 1)
    on_first(save_tables, "tables", str(tmp_path), 1)
    make_steps(1, BEFORE)
    on_first(set_rate, "tables", 0.02)
    on_first(save_tables, "tables", str(tmp_path), BEFORE, 1)
    at_save = on_first(weights_of, "tables")
    make_steps(BEFORE, STEPS)
    expected = on_first(weights_of, "tables")
    on_all(close_tables, "tables")
    for number, layout in enumerate(((servers, places), (SERVERS, {}))):
        # The second one is restored from the first, which has not a row of its own.
        open_on(*layout[:1], rule, *layout[1:], seed=5)
        on_first(restore_tables, "tables", str(tmp_path))
        check_same(on_first(weights_of, "tables"), at_save)
        on_first(save_tables, "tables", str(tmp_path), BEFORE, BEFORE)
        assert len(list_snapshots(tmp_path)) == 3 + number
        make_steps(BEFORE, STEPS)
        check_same(on_first(weights_of, "tables"), expected, bound=1e-13)
        on_all(close_tables, "tables")


@pytest.mark.usefixtures("workers")
def test_a_snapshot_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    open_on(SERVERS, "sgd", staleness=1)
    rpc.rpc_sync(TRAINERS[0], train_step, ("tables", 0, 0, torch.float64))
    for function, given in ((save_tables, (str(tmp_path), 1)), (restore_tables, (str(tmp_path),))):
        with pytest.raises(StepError, match=r"middle of a step.*wait between the same two steps"):
            on_first(function, "tables", *given)
    rpc.rpc_sync(TRAINERS[1], train_step, ("tables", 1, 0, torch.float64))
    assert on_first(save_tables, "tables", str(tmp_path), 1) == 1
    assert [each.step for each in list_snapshots(tmp_path)] == [1]
    on_all(close_tables, "tables")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("others", "staleness"), [([], 0), (TRAINERS, 1), ([], None)])
def test_a_push_while_rows_are_copied_fails_the_snapshot(
    others: list[str], staleness: int | None
) -> None:
    me = rpc.get_worker_info().name
    plan = plan_tables([TableConfig("words", 20, 4)], [me])
    tables = Tables(plan, trainers=[me, *others], staleness=staleness)
    optimizer = tables.optimizer(SGD())
    (entry,) = host_of("tables").leave(0, "mark", None)
    assert torch.equal(
        entry.local_value().state_dict()["tensors"]["weights"], tables.weights("words")
    )
    optimizer.step()
    with pytest.raises(StepError, match="a trainer has pushed while it was taken"):
        entry.local_value().state_dict()
    tables.close()
