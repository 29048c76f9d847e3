"""Rows that are pulled some batches ahead, from two servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes.embedding_functions import (
    RULES,
    close_tables,
    configs_of,
    draw_batch,
    open_tables,
    outputs_loss,
    train_step,
)
from torchweft import rpc
from torchweft.embedding import (
    Cache,
    Dynamic,
    IdOutOfRange,
    TableConfig,
    Tables,
    Wire,
    plan_tables,
)
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
SERVERS = ["worker0", "worker1"]
OTHER = "worker2"
STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


@pytest.fixture
def make() -> Iterator[Any]:
    made = []

    def make_tables(**options: Any) -> Tables:
        made.append(Tables(plan_tables(configs_of(torch.float64), SERVERS), **options))
        return made[-1]

    yield make_tables
    for tables in made:
        tables.close()


def batches_of(count: int | None = None) -> Iterator[Any]:
    steps = itertools.count() if count is None else range(count)
    return (draw_batch(0, step, torch.float64) for step in steps)


def inputs_of(batch: Any) -> Any:
    return batch.inputs


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_rows_ahead_are_those_of_a_lookup_in_the_order_of_the_batches(make: Any) -> None:
    tables = make()
    expected = [tables(batch.inputs) for batch in batches_of(STEPS)]
    found = [outputs for _, outputs in tables.stream(batches_of(STEPS), 3, inputs_of)]
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)


def test_the_gradients_of_rows_ahead_are_those_of_a_lookup(make: Any) -> None:
    weights = []
    for is_ahead in (True, False):
        tables = make(name=f"ahead {is_ahead}", staleness=1)
        optimizer = tables.optimizer(RULES["adagrad"])
        stream = (
            tables.stream(batches_of(2), 1, inputs_of)
            if is_ahead
            else ((batch, tables(batch.inputs)) for batch in list(batches_of(2)))
        )
        looked_up = list(stream)  # Before any step, so that both see the same rows.
        for batch, outputs in looked_up:
            outputs_loss(outputs, batch.target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        weights.append({each.name: tables.weights(each.name) for each in tables.plan.configs})
    check_equal(*weights)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("wire", [Wire(), Wire("fp16"), Wire("int8")], ids=str)
def test_synchronous_training_on_rows_ahead_has_the_bits_of_training_without(
    make: Any, ahead: int, wire: Wire
) -> None:
    dynamic = TableConfig("any", 200, 6, "sum", torch.float64, dynamic=Dynamic())
    trainers = [rpc.get_worker_info().name, OTHER]
    plan = plan_tables([*configs_of(torch.float64), dynamic], SERVERS, trainers=2)
    found = []
    for number in (0, ahead):
        rpc.rpc_sync(OTHER, open_tables, (plan, trainers, "adagrad"), kwargs={"wire": wire})
        tables = Tables(plan, trainers=trainers, wire=wire)
        optimizer = tables.optimizer(RULES["adagrad"])
        with tables.stream(batches_of(), number, with_any_ids) as stream:
            for step, (batch, outputs) in enumerate(itertools.islice(stream, STEPS)):
                other = rpc.rpc_async(OTHER, train_step, ("tables", 1, step, torch.float64))
                optimizer.zero_grad()
                outputs_loss(outputs, batch.target).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                other.wait()
        pulled = sum(each.pulled_bytes for each in tables.traffic().values())
        weights = {each.name: tables.weights(each.name) for each in configs_of(torch.float64)}
        found.append((weights, tables.rows("any"), tables.staleness(), pulled))
        tables.close()
        rpc.rpc_sync(OTHER, close_tables, ("tables",))
    (expected, rows, staleness, bytes_without), (weights, same, counts, bytes_ahead) = found
    check_equal(weights, expected)
    assert all(map(torch.equal, same, rows))
    assert set(counts) == set(staleness) == {0}
    assert bytes_without < bytes_ahead < 2.5 * bytes_without


def with_any_ids(batch: Any) -> Any:
    """Returns the inputs of a batch, and ids that are no row numbers."""
    return {**batch.inputs, "any": batch.inputs["seen"] * 10**9 - 5}


def test_a_look_ahead_of_a_cache_beyond_the_bound_is_refused_in_training(make: Any) -> None:
    tables = make(staleness=1, cache=Cache(0.1))
    tables.optimizer(RULES["sgd"])
    with pytest.raises(ConfigurationError, match=r"have staleness=1.*pass at most ahead=1"):
        tables.stream(batches_of(), 2, inputs_of)


def test_ids_that_a_table_lacks_end_a_stream(make: Any) -> None:
    tables = make()
    inputs = [{"pages": torch.tensor([each])} for each in (1, 99)]
    with pytest.raises(IdOutOfRange, match="99"):
        list(tables.stream(inputs, 1))
