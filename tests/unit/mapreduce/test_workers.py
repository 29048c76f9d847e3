"""Tests the meaning of names and ranks, in a group and before joining one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.mapreduce.fake_group import join, stay_outside
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotInitialized, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce.workers import (
    all_ranks,
    checked_workers,
    own_rank,
    rank_of,
    ranks_of,
    without_lost,
)


@pytest.mark.parametrize("worker", [2, "worker2", WorkerInfo("worker2", 2)])
def test_a_worker_of_the_group_is_its_rank(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    join(monkeypatch, 3)
    assert rank_of(worker, "partitioner") == 2


@pytest.mark.parametrize("worker", [3, -1, "nobody", "", WorkerInfo("worker2", 1)])
def test_a_worker_that_is_not_there_is_told_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    join(monkeypatch, 3)
    with pytest.raises(ConfigurationError, match=r"^where: .*'worker0' \(0\), 'worker1'") as caught:
        rank_of(worker, "where")
    assert isinstance(caught.value.__cause__, UnknownWorker)


@pytest.mark.parametrize("worker", [None, True, 1.0, [1], b"worker1"])
def test_what_is_no_worker_is_told(worker: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^where is .*; pass the rank or the name"):
        rank_of(worker, "where")


def test_a_rank_stands_for_itself_before_there_is_a_group() -> None:
    assert rank_of(7, "where") == 7
    assert rank_of(WorkerInfo("worker7", 7), "where") == 7


def test_a_name_means_nothing_before_there_is_a_group() -> None:
    with pytest.raises(NotInitialized):
        rank_of("worker0", "where")


def test_all_workers_and_oneself_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3, rank=1)
    assert (all_ranks(), own_rank()) == ((0, 1, 2), 1)


def test_all_workers_and_oneself_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_outside(monkeypatch, 4, rank=3)
    assert (all_ranks(), own_rank()) == ((0, 1, 2, 3), 3)


def test_who_is_lost_is_left_out_unless_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    members = join(monkeypatch, 3)
    members.find(1).declare_lost("a test")
    assert without_lost((2, 1, 0)) == (2, 0)
    assert without_lost((1,)) == (1,)


@pytest.mark.parametrize(
    ("workers", "error", "text"),
    [
        ("worker1", ArgumentTypeError, r"^workers is a str; pass a list, such as workers=\["),
        (2, ArgumentTypeError, "^workers is an int; pass a list"),
        (WorkerInfo("worker1", 1), ArgumentTypeError, "^workers is a WorkerInfo; pass a list"),
        ([0, 1.5], ArgumentTypeError, r"^workers\[1\] is a float; pass the ranks or names"),
        ([[0, 1]], ArgumentTypeError, r"^workers\[0\] is a list of 2; pass the ranks or names"),
        ([None], ArgumentTypeError, r"^workers\[0\] is None; pass the ranks or names"),
        ([], ConfigurationError, "^workers is empty; name one at least, or pass None for all"),
    ],
)
def test_what_are_not_several_workers_is_told(
    workers: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        checked_workers(workers, "workers")


def test_workers_are_taken_from_any_iterable_in_its_order() -> None:
    assert checked_workers(iter([2, "worker0"]), "workers") == (2, "worker0")


def test_a_worker_named_twice_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3)
    assert ranks_of(("worker2", 0, 2), "workers") == (2, 0, 2)
