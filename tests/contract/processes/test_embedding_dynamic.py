"""Tables with dynamic ids on servers, compared with dicts of rows in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.dynamic_ids import (
    CONFIGS,
    close_dynamic,
    open_dynamic,
    restore_dynamic,
    rows_of,
    save_dynamic,
    step_dynamic,
)
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    Adagrad,
    BadIds,
    Cache,
    CapacityError,
    Dynamic,
    Occupancy,
    Plan,
    RowWise,
    RowWiseAdagrad,
    Rule,
    SparseAdam,
    TableConfig,
    Tables,
    TablesMismatch,
    TableWise,
    Wire,
    plan_tables,
)
from torchweft.errors import ConfigurationError, StateMismatch
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]
RULES: dict[str, Rule] = {
    "sgd": SGD(lr=0.05, momentum=0.5),
    "adagrad": Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "row-wise": RowWiseAdagrad(lr=0.1),
    "adam": SparseAdam(lr=0.05),
}
Rows = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def plan_on(servers: list[str]) -> Plan:
    """Returns a plan with all tables cut by row."""
    places = {config.name: RowWise(*servers) for config in CONFIGS}
    return plan_tables(CONFIGS, servers, trainers=2, places=places)


def on_all(function: Any, *args: Any, **options: Any) -> list[Any]:
    futures = [rpc.rpc_async(name, function, args, kwargs=options) for name in TRAINERS]
    return [future.wait() for future in futures]


def on_first(function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(TRAINERS[0], function, args)


def open_on(servers: list[str], rule: str, **options: Any) -> None:
    on_all(open_dynamic, plan_on(servers), RULES[rule], trainers=TRAINERS, **options)


def make_steps(first: int, end: int) -> list[list[float]]:
    losses = []
    for step in range(first, end):
        futures = [
            rpc.rpc_async(name, step_dynamic, ("tables", number, step))
            for number, name in enumerate(TRAINERS)
        ]
        losses.append([future.wait() for future in futures])
    return losses


def train(servers: list[str], rule: str, steps: int) -> tuple[list[list[float]], Rows]:
    open_on(servers, rule)
    losses, rows = make_steps(0, steps), on_first(rows_of, "tables")
    on_all(close_dynamic, "tables")
    return losses, rows


def check_same(found: Rows, expected: Rows) -> None:
    for name, (ids, rows) in expected.items():
        assert found[name][0].tolist() == ids.tolist(), name
        assert torch.equal(found[name][1], rows), name


def test_runs_repeat_bit_by_bit() -> None:
    losses, rows = train(SERVERS, "adam", 12)
    again, others = train(SERVERS, "adam", 12)
    assert again == losses
    check_same(others, rows)


@pytest.mark.parametrize(
    ("servers", "tables"),
    [
        (["worker3", "worker0"], [config.name for config in CONFIGS]),
        (["worker2"], ["pages"]),
        (["worker0", "worker2", "worker3"], ["pages"]),
    ],
    ids=["two others", "one", "three"],
)
def test_a_restored_run_goes_on_bit_by_bit(
    tmp_path: Path, servers: list[str], tables: list[str]
) -> None:
    open_on(SERVERS, "adam")
    make_steps(0, 8)
    on_first(save_dynamic, "tables", str(tmp_path), 8)
    saved = on_first(rows_of, "tables")
    on_all(close_dynamic, "tables")
    _, expected = train(SERVERS, "adam", 12)
    open_on(servers, "adam")
    make_steps(0, 1)  # Restoring replaces what there is.
    assert on_first(restore_dynamic, "tables", str(tmp_path)) == 8
    found = on_first(rows_of, "tables")
    check_same(found, {name: saved[name] for name in tables})
    for name, (ids, rows) in found.items():  # A smaller part of a table has the last rows.
        kept = torch.isin(saved[name][0], ids)
        assert torch.equal(saved[name][1][kept], rows), name
        assert len(ids) > 0.7 * len(saved[name][0]), name
    make_steps(8, 12)
    if tables == [config.name for config in CONFIGS]:
        check_same(on_first(rows_of, "tables"), expected)
    on_all(close_dynamic, "tables")


USERS = TableConfig("users", 40, 3, "sum", torch.float64, dynamic=Dynamic())


def make_tables(config: TableConfig = USERS, servers: int = 2, **options: Any) -> Tables:
    place = RowWise(*SERVERS[:servers])
    return Tables(plan_tables([config], SERVERS, places={config.name: place}), **options)


def change(tables: Tables, optimizer: Any, ids: Tensor) -> None:
    optimizer.zero_grad()
    tables({"users": ids.view(-1, 1)})["users"].sum().backward()
    optimizer.step()


def test_a_run_on_another_number_of_servers_goes_on_bit_by_bit(tmp_path: Path) -> None:
    ids = torch.randint(-(2**62), 2**62, (6, 20), generator=torch.Generator().manual_seed(0))
    config = TableConfig("users", 400, 3, "sum", torch.float64, dynamic=Dynamic(2))
    ids[3:] = ids[:3]
    tables = make_tables(config)
    optimizer = tables.optimizer(SparseAdam())
    for each in ids[:4]:
        change(tables, optimizer, each)
    tables.save(tmp_path, step=4)
    for each in ids[4:]:
        change(tables, optimizer, each)
    expected, occupancy = tables.rows("users"), tables.occupancy()["users"]
    tables.close()
    assert (occupancy.rows, occupancy.waiting, occupancy.evicted) == (60, 0, 0)
    # The capacity may be another one, too.
    fewer = TableConfig("users", 100, 3, "sum", torch.float64, dynamic=Dynamic(2))
    other = make_tables(fewer, servers=1)
    optimizer = other.optimizer(SparseAdam())
    other.restore(tmp_path)
    for each in ids[4:]:
        change(other, optimizer, each)
    check_same({"users": other.rows("users")}, {"users": expected})
    other.close()


def test_a_restored_table_that_is_too_small_keeps_the_last_rows(tmp_path: Path) -> None:
    tables = make_tables(servers=1)
    optimizer = tables.optimizer(SGD())
    for first in (0, 10, 20):
        change(tables, optimizer, torch.arange(first, first + 10))
    change(tables, optimizer, torch.arange(3))
    tables.save(tmp_path, step=4)
    tables.close()
    small = make_tables(TableConfig("users", 15, 3, "sum", torch.float64, dynamic=Dynamic()), 1)
    small.optimizer(SGD())
    small.restore(tmp_path)
    assert small.rows("users")[0].tolist() == [0, 1, 2, *range(18, 30)]
    small.close()


def test_a_snapshot_of_numbered_rows_is_of_another_table(tmp_path: Path) -> None:
    tables = make_tables(TableConfig("users", 40, 3, "sum", torch.float64))
    tables.optimizer(SGD())
    tables.save(tmp_path, step=1)
    tables.close()
    tables = make_tables()
    tables.optimizer(SGD())
    with pytest.raises(
        StateMismatch, match=r"'users', .* has rows=40 in the snapshot and 'dynamic'"
    ):
        tables.restore(tmp_path)
    tables.close()


def test_a_lookup_allocates_nothing_and_any_worker_may_read() -> None:
    tables = make_tables(seed=3)
    ids = torch.tensor([[2**63 - 1, -(2**63)], [0, -1]])
    first = tables({"users": ids})["users"]
    assert tables.occupancy()["users"] == Occupancy(0, 40, 0, 0, 0, 0)
    assert [len(each) for each in tables.rows("users")] == [0, 0]
    assert torch.equal(tables({"users": ids})["users"], first)
    assert len(first.unique()) == 6
    tables.close()


@pytest.mark.parametrize("staleness", [2, None])
def test_rows_that_travel_ahead_and_in_low_precision(staleness: int | None) -> None:
    tables = make_tables(staleness=staleness, wire=Wire(pulled="fp16", pushed="bf16"))
    optimizer = tables.optimizer(SGD(lr=0.5))
    batches = [{"users": torch.arange(step, step + 4).view(-1, 1)} for step in range(6)]
    before = tables({"users": torch.arange(9).view(-1, 1)})["users"].detach()
    with tables.stream(batches, 2) as stream:
        for _, out in stream:
            optimizer.zero_grad()
            out["users"].sum().backward()
            optimizer.step()
    ids, rows = tables.rows("users")
    counts = torch.tensor([1, 2, 3, 4, 4, 4, 3, 2, 1], dtype=torch.float64)
    assert ids.tolist() == list(range(9))
    assert torch.allclose(rows, before - 0.5 * counts.unsqueeze(1), rtol=0, atol=2e-3)
    tables.close()


def test_dynamic_tables_train_beside_others() -> None:
    days = TableConfig("days", 7, 3, "none", torch.float64)
    places = {"days": TableWise("worker2"), "users": RowWise(*SERVERS)}
    tables = Tables(plan_tables([days, USERS], SERVERS, places=places))
    before = tables.weights("days")
    optimizer = tables.optimizer(SGD(lr=1.0))
    ids = torch.tensor([-5, 2**40])
    start = tables({"users": ids.view(-1, 1)})["users"].detach()
    out = tables({"users": ids.view(-1, 1), "days": torch.tensor([6, 0])})
    (out["users"] + out["days"]).sum().backward()
    optimizer.step()
    assert torch.equal(tables.rows("users")[1], start - 1)
    assert torch.equal(tables.weights("days")[[0, 6]], before[[0, 6]] - 1)
    assert tables.traffic()["users"].pushed_bytes == 2 * (8 + 24)
    tables.close()


def test_a_step_with_more_ids_than_rows_is_refused_before_anything_changes() -> None:
    tables = make_tables(TableConfig("users", 8, 3, "sum", torch.float64, dynamic=Dynamic()), 1)
    optimizer = tables.optimizer(SGD())
    change(tables, optimizer, torch.arange(8))
    rows = tables.rows("users")
    message = r"9 ids of table 'users' on 'worker2'.* push 8"
    with pytest.raises(CapacityError, match=message) as info:
        change(tables, optimizer, torch.arange(20, 29))
    assert (info.value.table, info.value.server) == ("users", "worker2")
    assert (info.value.count, info.value.limit) == (9, 8)
    check_same({"users": tables.rows("users")}, {"users": rows})
    tables({"users": torch.arange(100).view(-1, 1)})  # Lookups have no limit.
    change(tables, optimizer, torch.arange(20, 28))
    assert tables.rows("users")[0].tolist() == list(range(20, 28))
    tables.close()


def test_the_trainers_of_a_step_share_the_capacity() -> None:
    tables = make_tables(trainers=[rpc.get_worker_info().name, *TRAINERS], servers=1)
    optimizer = tables.optimizer(SGD())
    with pytest.raises(CapacityError, match=r"14 ids .* may push 13"):
        change(tables, optimizer, torch.arange(14))
    tables.close()


def test_wrong_uses_are_refused_with_typed_errors() -> None:
    tables = make_tables()
    for use in (tables.weights, lambda name: tables.set_weights(name, torch.zeros(40, 3))):
        with pytest.raises(BadIds, match="'users' has dynamic ids"):
            use("users")
    with pytest.raises(BadIds, match="no table 'user'"):
        tables.rows("user")
    with pytest.raises(BadIds, match=r"torch.float32; use a dense tensor"):
        tables({"users": torch.rand(3, 1)})
    tables.close()
    numbered = make_tables(TableConfig("users", 40, 3))
    with pytest.raises(BadIds, match="numbers of rows"):
        numbered.rows("users")
    numbered.close()
    with pytest.raises(ConfigurationError, match="'users' has dynamic ids, and a cache"):
        make_tables(cache=Cache(0.1), staleness=2)


def test_trainers_agree_on_when_ids_get_rows() -> None:
    tables = make_tables()
    other = TableConfig("users", 40, 3, "sum", torch.float64, dynamic=Dynamic(2))
    with pytest.raises(TablesMismatch, match=r"differ in table 'users'.*admit_after=2"):
        make_tables(other)
    tables.close()
