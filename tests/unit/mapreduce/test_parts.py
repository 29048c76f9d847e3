"""Tests triples with a weight, and the mark for values that are not cut."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.unit.mapreduce.fake_group import join, stay_outside
from torchweft.errors import ArgumentTypeError, ConfigurationError, NotInitialized, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce.partitioners import (
    Broadcast,
    Part,
    all_ranks,
    bare,
    broadcast,
    checked_workers,
    kind_of,
    rank_of,
    ranks_of,
    with_note,
    without_lost,
)
from torchweft.mapreduce.world import get_world_rank


def test_a_part_is_a_triple() -> None:
    part = Part(1, (2,), {"k": 3}, weight=4.0)
    worker, args, kwargs = part
    assert (worker, args, kwargs) == part == (1, (2,), {"k": 3})
    assert (len(part), isinstance(part, tuple), part.weight) == (3, True, 4.0)
    assert Part(0, (), {}).weight == 1.0


@pytest.mark.parametrize("travel", [copy.copy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_part_that_travelled_has_its_weight(travel) -> None:  # type: ignore[no-untyped-def]
    arrived = travel(Part(1, (2,), {"k": 3}, weight=4.0))
    assert type(arrived) is Part
    assert (tuple(arrived), arrived.weight) == ((1, (2,), {"k": 3}), 4.0)


def test_a_mark_holds_the_value_itself() -> None:
    value = {"w": torch.zeros(2)}
    assert broadcast(value).value is value
    assert repr(broadcast(value)) == "broadcast(dict)"


def test_marks_do_not_add_up() -> None:
    w = torch.zeros(2)
    assert broadcast(broadcast(w)).value is w
    assert broadcast({"w": broadcast(w)}).value == {"w": w}


def test_arguments_lose_their_marks_and_keep_all_else() -> None:
    w, others = torch.zeros(2), [torch.ones(1), {"deep": (1, 2)}]
    args, kwargs = bare(((broadcast(w), others, {"w": [broadcast(w)]}), {"key": broadcast(w)}))
    assert args[0] is args[2]["w"][0] is kwargs["key"] is w
    assert args[1] is others


def test_a_tree_without_marks_is_left_as_it_is() -> None:
    tree = (torch.zeros(2), [1, {"a": None}])
    assert bare(tree) is tree


def test_a_mark_can_be_pickled() -> None:
    arrived = pickle.loads(pickle.dumps(broadcast([1, 2])))
    assert type(arrived) is Broadcast
    assert arrived.value == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1, "an int"),
        ("text", "a str"),
        ([1, 2], "a list of 2"),
        ((), "a tuple of 0"),
        (torch.zeros(2, 3), "a Tensor of shape (2, 3)"),
    ],
)
def test_what_a_value_is(value: object, text: str) -> None:
    assert kind_of(value) == text


def test_notes_come_one_after_the_other() -> None:
    error: Any = KeyError("missing")
    assert with_note(error, "first") is error
    with_note(error, "second")
    assert error.__notes__ == ["first", "second"]


def test_notes_of_others_stay_theirs() -> None:
    error: Any = KeyError("missing")
    others = error.__notes__ = ["first"]
    with_note(error, "second")
    assert (others, error.__notes__) == (["first"], ["first", "second"])


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_an_error_that_takes_no_attributes_stays_as_it_is() -> None:
    error = Frozen(5)
    assert with_note(error, "first") is error
    assert not hasattr(error, "__notes__")


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
    assert (all_ranks(), get_world_rank()) == ((0, 1, 2), 1)


def test_all_workers_and_oneself_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_outside(monkeypatch, 4, rank=3)
    assert (all_ranks(), get_world_rank()) == ((0, 1, 2, 3), 3)


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
