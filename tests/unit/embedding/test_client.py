"""Groups of trainers: who is in one, which rows are pulled once, and what a group pushes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.embedding.client import Batch, fewest, gathered, groups_of, share, wait_for
from torchweft.embedding.rows import Entries, sum_rows
from torchweft.errors import CallCancelled, ConfigurationError, WorkerLost

TRAINERS = ["a", "b", "c", "d"]
HOSTS = {"a": "one", "b": "two", "c": "one", "d": "two"}


@pytest.mark.parametrize(
    ("aggregate", "staleness", "message"),
    [
        ("host", None, "no common steps"),
        ("hosts", 0, "use 'host'"),
        ([["a", "b"], ["c"]], 0, "name each trainer in one group"),
        ([["a", "b"], ["b", "c", "d"]], 0, "name each trainer in one group"),
        ([["a", "b", "x"], ["c", "d"]], 0, "name each trainer in one group"),
        ([["a", "b", "c", "d"], []], 0, "name each trainer in one group"),
    ],
)
def test_groups_that_cannot_work_are_refused(aggregate: Any, staleness: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        groups_of(aggregate, TRAINERS, staleness, HOSTS)


TABLE = torch.arange(40.0).view(20, 2)


def look_up(rows: list[int], batches: list[Batch]) -> list[int]:
    """Looks rows up as an aggregator does; returns those that it pulls."""
    wanted = torch.tensor(rows, dtype=torch.int32)
    parts, new = share(wanted, batches)
    if new is not None:
        new.values = TABLE[new.rows.long()]
    assert torch.equal(gathered(parts, len(rows)), TABLE[wanted.long()])
    return [] if new is None else new.rows.tolist()


def test_rows_of_a_step_are_pulled_once() -> None:
    batches: list[Batch] = []
    assert look_up([1, 4, 7], batches) == [1, 4, 7]
    assert look_up([1, 4, 7], batches) == []
    assert look_up([0, 4, 5, 7, 19], batches) == [0, 5, 19]
    assert look_up([0, 1, 2, 19], batches) == [2]
    assert look_up([5], batches) == []
    assert len(batches) == 3


def rows_of(*numbers: int) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(numbers, dtype=torch.int32)
    return rows, torch.rand(len(rows), 4, dtype=torch.float64)


def entries_of(rows: int, bags: int) -> tuple[Any, ...]:
    """Returns gradients of bags that each have all of some rows."""
    numbers = torch.arange(bags, dtype=torch.int32).repeat(rows)
    counts = torch.full((rows,), bags, dtype=torch.int32)
    values = torch.rand(bags, 4, dtype=torch.float64)
    entries = Entries(torch.arange(rows, dtype=torch.int32), counts, numbers)
    return entries.numbers(torch.int32), rows, None, values


@pytest.mark.parametrize(
    ("parts", "lengths"),
    [
        ([rows_of(1, 5)], [2]),
        ([rows_of(1, 5), rows_of(1, 5)], [2]),
        ([rows_of(1, 5), entries_of(3, 40)], [2]),
        ([entries_of(3, 40), entries_of(3, 40)], [2]),
        ([entries_of(200, 1), entries_of(200, 1)], [4, 4]),
        ([rows_of(1), entries_of(200, 1), rows_of(1), entries_of(200, 1)], [2, 4, 4]),
    ],
)
def test_a_group_pushes_sums_of_rows_unless_bags_are_fewer_bytes(
    parts: Any, lengths: list[int]
) -> None:
    found = fewest(parts)
    assert [len(part) for part in found] == lengths
    (rows, sums), (wanted, expected) = sum_rows(found), sum_rows(parts)
    assert torch.equal(rows, wanted)
    assert torch.allclose(sums, expected, rtol=0, atol=1e-14)


class Call(torch.futures.Future[None]):
    was_cancelled = False

    def cancel(self) -> None:
        if not self.done():
            self.was_cancelled = True
            self.set_exception(CallCancelled("it is cancelled"))


@pytest.mark.parametrize("cancels_others", [True, False])
def test_a_lost_server_ends_calls_that_may_wait_for_trainers_and_no_others(
    cancels_others: bool,
) -> None:
    lost, there = Call(), Call()
    calls: Any = {"lost": lost, "there": there}
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(wait_for, calls, cancels_others=cancels_others)
        lost.set_exception(WorkerLost("it is lost", worker="lost"))
        if not cancels_others:
            assert not wait([outcome], 0.05).done
            there.set_result(None)
        with pytest.raises(WorkerLost, match="it is lost"):
            outcome.result()
    assert there.was_cancelled == cancels_others
