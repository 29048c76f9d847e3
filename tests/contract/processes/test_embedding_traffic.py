"""The bytes of dense and sparse pushes, and of an all-gather, on a generated text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torchweft
from benchmarks.embedding.traffic import (
    exchanged_by,
    is_dense_copied,
    pushes_of,
    zipf_batches,
)
from torchweft.launch import Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORDS, DIM = 18_328, 64
HEADS = 1000
"""More than the heads of a step's messages have, in bytes."""


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=4, nursery=nursery):
        yield


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_push_has_each_row_once() -> None:
    batches = zipf_batches(WORDS, 3)
    ids = sum(each.numel() for each in batches) / len(batches)
    unique = sum(len(each.unique()) for each in batches) / len(batches)
    found = pushes_of("worker0", WORDS, batches)
    for counted, expected in (
        (found.dense, WORDS * DIM * 4),
        (found.repeated, ids * (8 + DIM * 4)),
        (found.sparse, unique * (4 + DIM * 4)),
    ):
        assert expected <= counted <= expected + HEADS
    assert found.dense / found.sparse >= 44
    assert found.dense / found.repeated == pytest.approx(25.4, rel=0.1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("count", "low", "high"), [(2, 0.9, 1.1), (4, 0.4, 0.55)])
def test_servers_beside_trainers_send_less_than_an_all_gather(
    count: int, low: float, high: float
) -> None:
    trainers = [f"worker{rank}" for rank in range(count)]
    found = exchanged_by(trainers, WORDS, zipf_batches(WORDS, 2 * count))
    assert low <= found.served / found.gathered <= high


def test_half_touched_tables_are_copied() -> None:
    assert is_dense_copied("worker0")
