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
    OneProcess,
    close_dynamic,
    occupancy_of,
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
    InputError,
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
    host,
    plan_tables,
)
from torchweft.embedding.routing import server_of
from torchweft.errors import ConfigurationError, StateMismatch
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]
STEPS = 20
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


@pytest.mark.parametrize(("rule", "count"), [*((rule, 2) for rule in RULES), ("adam", 1)])
def test_two_trainers_equal_dicts_of_rows_in_one_process(rule: str, count: int) -> None:
    open_on(SERVERS[:count], rule)
    losses, rows = make_steps(0, STEPS), on_first(rows_of, "tables")
    occupancy = on_first(occupancy_of, "tables")
    on_all(close_dynamic, "tables")
    alone = OneProcess(count, RULES[rule])
    for step in range(STEPS):
        assert losses[step] == pytest.approx(alone.train_step(2, step), abs=1e-12, rel=0)
    for name, (ids, values) in rows.items():
        expected = alone.rows(name)
        assert ids.tolist() == sorted(expected), name
        wanted = torch.stack([expected[number] for number in ids.tolist()])
        assert float((values - wanted).abs().max()) <= 1e-12, name
        parts = alone.parts[name]
        assert occupancy[name] == Occupancy(
            len(expected),
            parts[0].config.rows,
            sum(len(part.waiting) for part in parts),
            sum(part.admitted for part in parts),
            sum(part.evicted for part in parts),
            sum(part.dropped for part in parts),
        )
    # The scenario has what the test is about.
    assert min(occupancy[name].evicted for name in ("clicks", "visits")) > 0
    assert min(occupancy[name].dropped for name in ("tags", "rare")) > 0
    # These expire while there is room.
    assert min(occupancy[name].evicted for name in ("rare", "often")) > 0
    assert occupancy["pages"].evicted == 0


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


def test_no_server_takes_part_of_a_step_that_another_has_no_rows_for() -> None:
    tables = make_tables(TableConfig("users", 8, 3, "sum", torch.float64, dynamic=Dynamic()))
    optimizer = tables.optimizer(SGD())
    ids = torch.arange(40)
    servers = server_of(ids, 2)
    first, second = ids[servers == 0], ids[servers == 1]
    with pytest.raises(CapacityError, match=r"5 ids .* 'worker3'"):
        change(tables, optimizer, torch.cat([first[:2], second[:5]]))
    assert tables.occupancy()["users"].admitted == 0
    change(tables, optimizer, torch.cat([first[:4], second[:4]]))
    assert tables.occupancy()["users"].rows == 8
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


@pytest.mark.parametrize(
    ("stack", "parts", "error"),
    [
        ((torch.arange(3), 1, 3, None), None, "asked for sums of 'users'"),
        ((torch.arange(3, dtype=torch.int32),), None, "ids of 'users' of torch.int32"),
        (None, [(torch.arange(3).float(), torch.zeros(3, 3).double())], "of torch.float32"),
        (None, [(torch.arange(2), torch.zeros(3, 3).double())], r"gradients \[3, 3\]"),
        (None, [(torch.arange(21), torch.zeros(21, 3).double())], "21 ids"),
        (
            None,
            [(torch.tensor([0, 1, 0]), 1, None, torch.zeros(1, 3))],
            "gradients of bags",
        ),
    ],
    ids=["sums", "int32", "floats", "shape", "too many", "bags"],
)
def test_servers_refuse_messages_that_do_not_fit(stack: Any, parts: Any, error: str) -> None:
    tables = make_tables()
    optimizer = tables.optimizer(SGD())
    change(tables, optimizer, torch.arange(5))
    rows = tables.rows("users")
    function: Any = host.push
    given: Any = ("tables", 0, 1, 0.1, 0, [(0, 1, parts)])
    if parts is None:
        function, given = host.pull, ("tables", -1, 0, [(0, *stack)])
    with pytest.raises(InputError, match=error) as info:
        rpc.rpc_sync("worker2", function, given)
    assert (info.value.server, info.value.table) == ("worker2", "users")
    check_same({"users": tables.rows("users")}, {"users": rows})
    change(tables, optimizer, torch.arange(5))
    tables.close()
