"""The number of servers is tuned in the course of a training, whose result stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.tuning_functions import (
    BATCH,
    Training,
    plan_on,
)
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    CapacityError,
    Dynamic,
    PlanError,
    RowWise,
    TableConfig,
    Tables,
    plan_tables,
)
from torchweft.errors import BrokenChain, ConfigurationError
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
SERVERS = ["worker1", "worker2", "worker3", "worker0"]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


def test_rows_stay_where_they_are_if_a_trainer_cannot_move_them() -> None:
    me = rpc.get_worker_info().name
    training = Training(plan_on(SERVERS[:3], SERVERS[0]), [me], 0, "staying")
    training.step()
    tables, before = training.tables, training.content()
    other = plan_tables([TableConfig("words", 9, 4)], SERVERS)
    with pytest.raises(PlanError, match="other tables or other copies"):
        tables.reshard(other)
    tables({"days": torch.tensor([1])})["days"].sum().backward()
    with pytest.raises(ConfigurationError, match="gradients that were not pushed"):
        tables.reshard(plan_on(SERVERS[:2], SERVERS[0]))
    training.optimizer.zero_grad()
    # Another collection has the name on one of the servers.
    blocking = Tables(plan_tables([TableConfig("words", 9, 4)], SERVERS[1:2]), name="staying@1")
    with pytest.raises(ConfigurationError, match="differ"):
        tables.reshard(plan_on(SERVERS[:2], SERVERS[0]))
    blocking.close()
    for name, values in training.content().items():
        assert torch.equal(values, before[name])
    training.step()
    moved = training.content()
    tables.reshard(plan_on(SERVERS[:2], SERVERS[3]))
    assert tables.name == "staying@2"
    for name, values in training.content().items():
        assert torch.equal(values, moved[name])
    training.step()
    assert tables.traffic()["days"].ids == 3 * BATCH + 1
    tables.close()


def test_a_full_snapshot_is_due_after_rows_have_moved(tmp_path: Any) -> None:
    me = rpc.get_worker_info().name
    training = Training(plan_on(SERVERS[:3], SERVERS[0]), [me], 0, "saving")
    first = training.tables.save(tmp_path, step=0)
    training.tables.reshard(plan_on(SERVERS[:2], SERVERS[0]))
    with pytest.raises(BrokenChain, match="do not come from it"):
        training.tables.save(tmp_path, step=1, since=first)
    second = training.tables.save(tmp_path, step=1)
    training.step()
    assert training.tables.save(tmp_path, step=2, since=second).step == 2
    training.tables.close()


def test_dynamic_ids_that_would_not_fit_stay_where_they_are() -> None:
    config = TableConfig("users", 40, 2, "none", torch.float64, dynamic=Dynamic())
    tables = Tables(plan_tables([config], SERVERS[:1]), name="full")
    optimizer = tables.optimizer(SGD())
    tables({"users": torch.arange(40)})["users"].sum().backward()
    optimizer.step()
    ids, rows = tables.rows("users")
    places = {"users": RowWise(*SERVERS[:3])}  # The servers have 14, 13 and 13 rows.
    with pytest.raises(
        CapacityError, match="'users' do not fit on worker1, worker2, worker3"
    ) as it:
        tables.reshard(plan_tables([config], SERVERS, places=places))
    assert (it.value.count, it.value.table) == (40, "users")
    found = tables.rows("users")
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1], rows)
    tables.close()
