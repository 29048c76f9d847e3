"""Snapshots of tables: onto other servers and shards, and after the death of a server."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests import dynamic_ids
from tests.contract.processes.embedding_functions import (
    end_process,
)
from torchweft import rpc
from torchweft.checkpoint import list_snapshots
from torchweft.embedding import (
    SGD,
    Copies,
    Plan,
    RowWise,
    SparseAdam,
    TableConfig,
    Tables,
    plan_tables,
)
from torchweft.errors import (
    BrokenChain,
    ConfigurationError,
    SnapshotNotFound,
    StateMismatch,
    WorkerLost,
)
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]
SPARE = "worker4"
Weights = dict[str, Tensor]


def on_all(function: Any, *args: Any, **options: Any) -> list[Any]:
    futures = [rpc.rpc_async(name, function, args, kwargs=options) for name in TRAINERS]
    return [future.wait() for future in futures]


def on_first(function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(TRAINERS[0], function, args)


def test_a_lost_server_of_dynamic_ids_comes_back_bit_by_bit(
    tmp_path: Path, nursery: Nursery
) -> None:
    def open_dynamic_on(servers: list[str]) -> None:
        places = {each.name: RowWise(*servers) for each in dynamic_ids.CONFIGS}
        plan = plan_tables(dynamic_ids.CONFIGS, servers, trainers=2, places=places)
        on_all(dynamic_ids.open_dynamic, plan, SparseAdam(lr=0.05), trainers=TRAINERS)

    def make_dynamic_steps(first: int, end: int) -> list[list[float]]:
        losses = []
        for step in range(first, end):
            futures = [
                rpc.rpc_async(name, dynamic_ids.step_dynamic, ("tables", me, step))
                for me, name in enumerate(TRAINERS)
            ]
            losses.append([future.wait() for future in futures])
        return losses

    with torchweft.cluster(workers=5, nursery=nursery, check=False):
        open_dynamic_on(SERVERS)
        expected_losses = make_dynamic_steps(0, 9)
        expected = on_first(dynamic_ids.rows_of, "tables")
        on_all(dynamic_ids.close_dynamic, "tables")

        open_dynamic_on(SERVERS)
        losses = make_dynamic_steps(0, 4)
        on_first(dynamic_ids.save_dynamic, "tables", str(tmp_path), 4)
        for step in (4, 5):
            losses += make_dynamic_steps(step, step + 1)
            on_first(dynamic_ids.save_dynamic, "tables", str(tmp_path), step + 1, step)
        make_dynamic_steps(6, 7)
        with pytest.raises(WorkerLost):
            rpc.rpc_sync(SERVERS[1], end_process)
        for trainer in TRAINERS:
            with pytest.raises(WorkerLost, match=f"'{SERVERS[1]}'"):
                rpc.rpc_sync(trainer, dynamic_ids.close_dynamic, ("tables",))
        open_dynamic_on([SERVERS[0], SPARE])
        assert on_first(dynamic_ids.restore_dynamic, "tables", str(tmp_path)) == 6
        losses += make_dynamic_steps(6, 9)
        assert losses == expected_losses
        found = on_first(dynamic_ids.rows_of, "tables")
        for name, (ids, rows) in expected.items():
            assert torch.equal(found[name][0], ids), name
            assert torch.equal(found[name][1], rows), name


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Any:
    with torchweft.cluster(workers=5, nursery=nursery):
        yield


@pytest.mark.usefixtures("workers")
def test_other_tables_and_another_optimizer_are_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    words, users = TableConfig("words", 20, 4), TableConfig("users", 9, 2)
    first = Tables(plan_tables([words, users], SERVERS))
    first.optimizer(SGD(momentum=0.5))
    first.save(tmp_path, step=1)
    first.close()
    same, rule = plan_tables([words, users], SERVERS), SGD(momentum=0.5)
    on_both = re.escape(", saved on worker2, worker3 and now on worker2, worker3, has ")

    momentum = r"the optimizer is SGD\(momentum=0.5\) in the snapshot and SGD\(momentum=0.9\) on"

    def words_with(**options: Any) -> Plan:
        return plan_tables(
            [TableConfig("words", **{"rows": 20, "dim": 4, **options}), users], SERVERS
        )

    others = {
        f"'words'{on_both}rows=20 in the snapshot and 21 here": (words_with(rows=21), rule),
        f"'words'{on_both}pooling='sum' .* 'mean' here": (words_with(pooling="mean"), rule),
        f"'words'{on_both}padding_idx=None .* 2 here": (words_with(padding_idx=2), rule),
        f"'words'{on_both}vocabulary='' .* 'v2' here": (words_with(vocabulary="v2"), rule),
        r"only it has 'users' \(saved on worker[23]\)": (plan_tables([words], SERVERS), rule),
        r"it lacks 'more' \(now on worker[23]\)": (
            plan_tables([words, users, TableConfig("more", 3, 2)], SERVERS),
            rule,
        ),
        f"{momentum} worker2, worker3": (same, SGD(momentum=0.9)),
        "the optimizer is SGD.* in the snapshot and None on": (same, None),
    }
    for message, (plan, other_rule) in others.items():
        tables = Tables(plan, seed=3)
        if other_rule is not None:
            tables.optimizer(other_rule)
        before = tables.weights("words")
        with pytest.raises(StateMismatch, match=message):
            tables.restore(tmp_path)
        assert torch.equal(tables.weights("words"), before)
        tables.close()


@pytest.mark.usefixtures("workers")
def test_copies_are_saved_with_the_rows(tmp_path: Path) -> None:
    configs = [TableConfig("words", 20, 4), TableConfig("users", 9, 2)]
    plan = plan_tables(configs, SERVERS, places={"users": Copies()})
    saved_tables = Tables(plan, name="saved")
    saved_tables.save(tmp_path, step=1)
    tables = Tables(plan, seed=3)
    assert not torch.equal(tables.weights("users"), saved_tables.weights("users"))
    tables.restore(tmp_path)
    for name in ("words", "users"):
        assert torch.equal(tables.weights(name), saved_tables.weights(name))
    tables.close()
    saved_tables.close()


@pytest.mark.usefixtures("workers")
def test_increments_that_do_not_follow_their_base_are_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    config = TableConfig("words", 20, 4)
    tables = Tables(plan_tables([config], SERVERS, places={"words": RowWise(*SERVERS)}))
    optimizer = tables.optimizer(SGD())

    def change(row: int) -> None:
        tables({"words": torch.tensor([[row]])})["words"].sum().backward()
        optimizer.step()

    whole = tables.save(tmp_path, step=0)
    change(3)
    first = tables.save(tmp_path, step=1, since=whole)
    change(4)
    last = tables.save(tmp_path, step=2, since=first, keep=1)
    assert list_snapshots(tmp_path) == [whole, first, last]
    expected = tables.weights("words")
    with pytest.raises(ConfigurationError, match="saved beside its base"):
        tables.save(tmp_path / "other", step=3, since=last)
    with pytest.raises(SnapshotNotFound, match="step 7"):
        tables.save(tmp_path, step=3, since=7)
    tables.close()

    other = Tables(plan_tables([config], [SPARE]), seed=3)
    other.optimizer(SGD())
    before = other.weights("words")
    with pytest.raises(
        BrokenChain, match=re.escape(f"{last.path} cannot be saved: the rows")
    ) as it:
        other.save(tmp_path, step=3, since=last)
    assert (it.value.base, it.value.worker) == (last.path, SPARE)
    aside = Path(first.path).rename(tmp_path / "aside")
    message = f"{last.path} has the rows that changed since {first.path}, which is not there"
    with pytest.raises(BrokenChain, match=re.escape(message)) as caught:
        other.restore(tmp_path)
    assert (caught.value.snapshot, caught.value.base) == (last.path, first.path)
    shutil.copytree(whole.path, first.path)
    with pytest.raises(BrokenChain, match="is another snapshot of that name"):
        other.restore(tmp_path)
    shutil.rmtree(first.path)
    aside.rename(first.path)
    assert torch.equal(other.weights("words"), before)
    other.restore(tmp_path)
    assert torch.equal(other.weights("words"), expected)
    # The restored rows are a base, and those before them are none any more.
    other.set_weights("words", before)
    other.save(tmp_path, step=3, since=last)
    with pytest.raises(BrokenChain):
        other.save(tmp_path, step=4, since=first)
    other.restore(tmp_path, step=0)
    assert not torch.equal(other.weights("words"), expected)
    other.restore(tmp_path)
    assert torch.equal(other.weights("words"), before)
    other.close()
