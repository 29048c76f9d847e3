"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.embedding_functions import (
    RULES,
    close_tables,
    configs_of,
    open_tables,
    outputs_loss,
    train_step,
)
from tests.contract.processes.test_embedding_streams import (
    OTHER,
    SERVERS,
    STEPS,
    batches_of,
    check_equal,
    inputs_of,
)
from torchweft import rpc
from torchweft.embedding import (
    Cache,
    Tables,
    plan_tables,
)
from torchweft.errors import CallCancelled
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


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


def wait_for_all_ahead(stream: Any) -> set[int]:
    """Returns the versions of the rows that are pulled ahead, once they are here."""
    lookups = [each.lookup for each in stream._waiting]
    return {future.wait()[0] for each in lookups for future in each.futures.values()}


@pytest.mark.parametrize("staleness", [3, None])
def test_training_on_rows_ahead_counts_their_staleness(make: Any, staleness: int | None) -> None:
    tables = make(staleness=staleness)
    optimizer = tables.optimizer(RULES["sgd"])
    with tables.stream(batches_of(STEPS), 3, inputs_of) as stream:
        for batch, outputs in stream:
            wait_for_all_ahead(stream)  # before the push, so that the versions are certain
            optimizer.zero_grad()
            outputs_loss(outputs, batch.target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    counts = {0: 1, 1: 1, 2: 1, 3: STEPS - 3}
    assert tables.staleness() == {each: count * len(SERVERS) for each, count in counts.items()}


@pytest.mark.parametrize("cache", [None, Cache(0.0), Cache(1.0)])
def test_rows_that_have_become_too_old_are_pulled_again(make: Any, cache: Cache | None) -> None:
    trainers = [rpc.get_worker_info().name, OTHER]
    plan = plan_tables(configs_of(torch.float64), SERVERS)
    rpc.rpc_sync(OTHER, open_tables, (plan, trainers, "sgd"), kwargs={"staleness": 1})
    tables = make(trainers=trainers, staleness=1, cache=cache)
    optimizer = tables.optimizer(RULES["sgd"])

    def other_steps(step: int) -> None:
        rpc.rpc_sync(OTHER, train_step, ("tables", 1, step, torch.float64))

    def step_on(batch: Any, outputs: Any) -> None:
        outputs_loss(outputs, batch.target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with tables.stream(batches_of(), 1, inputs_of) as stream:
        step_on(*next(stream))
        second = next(stream)
        assert wait_for_all_ahead(stream) == {0}  # the third batch
        other_steps(0)
        step_on(*second)
        batch, outputs = next(stream)  # in step 2, which must see version 1
        check_equal(outputs, tables(batch.inputs))
        other_steps(1)
    assert max(tables.staleness()) == 1
    rpc.rpc_sync(OTHER, close_tables, ("tables",))


def test_a_closed_stream_has_no_open_pull_and_the_tables_go_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[Any] = []
    cancel = rpc.Future.cancel

    def noted_cancel(future: Any) -> bool:
        cancelled.append(future)
        return cancel(future)

    monkeypatch.setattr(rpc.Future, "cancel", noted_cancel)
    tables = make()
    with tables.stream(batches_of(), 2, inputs_of) as stream:
        _, first = next(stream)
        ahead: list[Any] = [each.lookup for each in stream._waiting]
    futures = [future for each in ahead for future in each.futures.values()]
    assert len(futures) >= len(ahead) == 2
    assert {id(each) for each in cancelled} == {id(each) for each in futures}
    for future in futures:
        try:
            future.wait()  # Race: another thread has read its answer, and is completing it.
        except CallCancelled:
            pass
        assert future.done()
    check_equal(tables(next(batches_of()).inputs), first)
