"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchweft
from tests.contract.processes.embedding_functions import (
    configs_of,
    skewed,
)
from tests.contract.processes.test_embedding_cache import (
    COUNTERS,
    OTHER,
    ROWS,
    SERVERS,
    STEPS,
    counters,
)
from torchweft import rpc
from torchweft.embedding import (
    SGD,
    Cache,
    IdOutOfRange,
    InputError,
    Tables,
    TablesMismatch,
    Wire,
    plan_tables,
)
from torchweft.embedding.requests import TableIds, prepare
from torchweft.errors import ConfigurationError
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=3, nursery=nursery):
        yield


@pytest.fixture
def make() -> Iterator[Any]:
    made = []

    def make_tables(configs: Any = None, **options: Any) -> Tables:
        plan = plan_tables(configs or configs_of(torch.float64), SERVERS)
        made.append(Tables(plan, **options))
        return made[-1]

    yield make_tables
    for tables in made:
        tables.close()


def draw_ids(step: int, trainer: int = 0, count: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * trainer + step)
    return skewed(count, ROWS, generator)


def push_to_all(tables: Tables, optimizer: Any) -> None:
    """Makes a step that adds 1 to each value, so that a row tells its version."""
    optimizer.zero_grad()
    # Beside the cache: a lookup of its own would make all rows young.
    flats = tables.reader.flats({"words": torch.arange(ROWS)})
    pushes: Any = {}
    for number, router in enumerate(tables.reader._routers):
        (each,) = prepare(number, router, [TableIds(0, router.stack.members[0], flats["words"])])
        for server, part in each.pushes(-torch.ones(ROWS, 4, dtype=torch.float64)).items():
            pushes.setdefault(server, {})[each.number] = each.used, [part]
    tables._client.push(1.0, tables._client.step, pushes)


def train_counters(
    trainers: list[str], me: int, bound: int, ahead: int | None
) -> tuple[list[int], int]:
    """Trains with a cache; returns the staleness of the oldest rows, and the largest counted."""
    cache = Cache(0.5 if ahead is None else 0.0)
    tables = Tables(counters(), trainers=trainers, staleness=bound, reduction="mean", cache=cache)
    optimizer = tables.optimizer(SGD(lr=1.0))
    batches = [{"words": draw_ids(step, me)} for step in range(STEPS)]
    found = []
    stream = None if ahead is None else tables.stream(batches, ahead)
    for step, batch in enumerate(batches):
        out = tables(batch) if stream is None else next(stream)[1]
        found.append(step - int(out["words"].min()))
        push_to_all(tables, optimizer)
    counted = max(tables.staleness())
    moved = tables.traffic()["words"]
    assert (moved.hits > 0) == (bound > 0)
    tables.close()
    return found, counted


@pytest.mark.parametrize(("bound", "ahead"), [(1, None), (4, None), (2, 2), (6, 2), (6, 6)])
def test_no_trainer_uses_a_row_beyond_the_bound(bound: int, ahead: int | None) -> None:
    trainers = [rpc.get_worker_info().name, OTHER]
    other = rpc.rpc_async(OTHER, train_counters, args=(trainers, 1, bound, ahead))
    for found, counted in (train_counters(trainers, 0, bound, ahead), other.wait()):
        assert 0 <= min(found) <= max(found) <= bound
        assert counted <= bound


@pytest.mark.parametrize("ahead", [None, 3])
def test_a_trainer_alone_uses_rows_up_to_the_bound_and_the_histogram_says_so(
    ahead: int | None,
) -> None:
    found, counted = train_counters([rpc.get_worker_info().name], 0, 5, ahead)
    assert max(found) == counted == 5


def test_a_stream_that_is_left_or_fails_gives_its_rows_up(make: Any) -> None:
    tables = make([COUNTERS], cache=Cache(0.0))
    batches = [{"words": draw_ids(step)} for step in range(5)]
    with tables.stream(batches, 3) as stream:
        next(stream)
    with pytest.raises(IdOutOfRange):
        list(tables.stream([*batches[:2], {"words": torch.tensor([ROWS])}], 1))
    assert [len(each) for each in tables.reader._caches] == [0]
    assert tables(batches[4])["words"].shape == (16, 4)


def test_rows_in_the_asynchronous_mode_are_used_for_so_many_steps() -> None:
    tables = Tables(counters(), name="async", staleness=None, cache=Cache(1.0, steps=2))
    optimizer = tables.optimizer(SGD(lr=1.0))
    found = []
    for _ in range(7):
        found.append(int(tables({"words": torch.tensor([3])})["words"].min()))
        push_to_all(tables, optimizer)
    assert found == [0, 0, 0, 3, 3, 3, 6]
    with pytest.raises(ConfigurationError, match=r"has steps=2, .* pass at most ahead=2"):
        tables.stream([], 3)
    tables.close()


def test_trainers_agree_on_the_form_and_servers_refuse_another(make: Any) -> None:
    tables = make(wire=Wire("fp16", "fp16"))
    with pytest.raises(TablesMismatch, match="differ in wire"):
        make(wire=Wire("bf16", "fp16"))
    tables.optimizer(SGD())
    before = tables.weights("words")
    pushes = [(0, 1, [(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 6))])]
    with pytest.raises(
        InputError, match=r"sent values of torch.float32 for .*; its tables take 'fp16'"
    ):
        tables._client.call("push", {SERVERS[0]: (0, 0, 0.1, 0, pushes)})
    assert torch.equal(tables.weights("words"), before)
