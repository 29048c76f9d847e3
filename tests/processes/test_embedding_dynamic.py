"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.test_embedding_dynamic import (
    RULES,
    SERVERS,
    change,
    check_same,
    make_steps,
    make_tables,
    on_all,
    on_first,
    open_on,
)
from tests.dynamic_ids import (
    close_dynamic,
    occupancy_of,
    rows_of,
)
from tests.dynamic_ids_alone import OneProcess
from torchweft.embedding import (
    SGD,
    CapacityError,
    Dynamic,
    InputError,
    Occupancy,
    TableConfig,
)
from torchweft.embedding.dynamic import server_of
from torchweft.launch import Nursery

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


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
    method, given = "push", (0, 1, 0.1, 0, [(0, 1, parts)])
    if parts is None:
        method, given = "pull", (-1, 0, [(0, *stack)])
    with pytest.raises(InputError, match=error) as info:
        tables._client.call(method, {"worker2": given})
    assert (info.value.server, info.value.table) == ("worker2", "users")
    check_same({"users": tables.rows("users")}, {"users": rows})
    change(tables, optimizer, torch.arange(5))
    tables.close()
