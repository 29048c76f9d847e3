"""Tests which partitioners ``cut`` accepts and refuses, and the parts that it makes."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import pytest
import torch

from tests.tables import cases
from tests.unit.mapreduce.fake_group import join, stay_outside
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.mapreduce.partitioners import (
    Cut,
    Part,
    batch_partitioner,
    broadcast,
    cut,
    dim_partitioner,
)

X = torch.arange(5.0)


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3)


def triples_of(made: Cut) -> list[tuple[int, list[Any]]]:
    return [(part[0], part[1][0].tolist()) for part in made.parts]


@pytest.mark.parametrize("partitioner", [None, batch_partitioner, dim_partitioner()])
def test_by_default_the_batch_is_cut_for_all_workers(partitioner: Any) -> None:
    made = cut(partitioner, (X,), {"key": 1})
    assert triples_of(made) == [(0, [0.0]), (1, [1.0]), (2, [2.0, 3.0, 4.0])]
    assert [part[2] for part in made.parts] == [{"key": 1}] * 3
    assert [part.weight for part in made.parts] == [1.0, 1.0, 3.0]
    assert (made.workers, made.is_any) == ((0, 1, 2), True)


def test_a_partitioner_names_more_workers_than_get_parts() -> None:
    made = cut(dim_partitioner(workers=["worker2", 0, 1]), (X[:2],), None)
    assert [part[0] for part in made.parts] == [2, 0]
    assert made.workers == (2, 0, 1)


@pytest.mark.parametrize("worker", [2, "worker2", WorkerInfo("worker2", 2)])
def test_a_worker_gets_all_arguments_as_they_are(worker: Any) -> None:
    nested = [X, {"a": X}]
    made = cut(worker, (nested, 1, broadcast(X)), {"key": {"y": broadcast(X)}})
    [part] = made.parts
    assert (part[0], part.weight, made.workers, made.is_any) == (2, 1.0, (2,), False)
    assert part[1][0] is nested
    assert part[1][2] is part[2]["key"]["y"] is X


def in_reverse(*args: Any, **kwargs: Any) -> list[Any]:
    return [("worker1", args[::-1], kwargs), (0, args, kwargs), (1, (), {})]


def test_a_function_says_who_gets_what() -> None:
    made = cut(in_reverse, (1, 2), {"key": 3})
    assert made.parts == [(1, (2, 1), {"key": 3}), (0, (1, 2), {"key": 3}), (1, (), {})]
    assert all(type(part) is Part and part.weight == 1.0 for part in made.parts)
    assert (made.workers, made.is_any) == ((1, 0), False)


@pytest.mark.parametrize(
    "returned",
    [
        [(1, (2,), {}), (0, (3,), {})],
        ((1, [2], None), [0, (3,), {}]),
        deque([("worker1", (2,), {}), (WorkerInfo("worker0", 0), (3,), {})]),
        {1: (1, (2,), {}), 0: (0, (3,), {})}.values(),
    ],
    ids=["as documented", "other sequences and no kwargs", "names", "view"],
)
def test_triples_may_be_given_in_several_ways(returned: Any) -> None:
    assert cut(lambda: returned).parts == [(1, (2,), {}), (0, (3,), {})]


def test_a_function_sees_marks_and_the_parts_do_not() -> None:
    seen = []

    def rotated(*args: Any) -> list[Any]:
        seen.extend(args)
        return [(2 - rank, own, rest) for rank, own, rest in batch_partitioner(*args)]

    made = cut(rotated, (X, broadcast(X)))
    assert type(seen[1]) is type(broadcast(X))
    assert [(part[0], part[1][0].tolist()) for part in made.parts[:2]] == [(2, [0]), (1, [1])]
    assert all(part[1][1] is X for part in made.parts)


def test_a_function_may_give_parts_a_weight() -> None:
    made = cut(lambda: [Part("worker1", (), {}, weight=2.0), (0, (), {})])
    assert [(part[0], part.weight) for part in made.parts] == [(1, 2.0), (0, 1.0)]
    made = cut(lambda *args: batch_partitioner(*args)[::-1], (X,))
    assert [part.weight for part in made.parts] == [3.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "args", [(torch.zeros(3, 0),), (X, []), (1, {"tasks": ((), [])}), ([X, {}],), (1, "")]
)
def test_a_function_may_return_nothing_for_empty_arguments(args: tuple[Any, ...]) -> None:
    assert cut(lambda *_: [], args) == ([], (), False)


@pytest.mark.parametrize("args", [(), (X,), (1, [2], {"a": None}), (torch.zeros(()),)])
def test_a_function_that_returns_nothing_for_something_is_told(args: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"^partitioner .*forgetful returned no triples"):
        cut(forgetful, args)


def forgetful(*args: Any) -> list[Any]:
    return []


@cases(
    ("returned", "text"),
    [
        (None, "returns returned None; return a list of triples"),
        (3, "returned an int; return a list of triples"),
        ("worker1", "returned a str; return a list of triples"),
        ({"worker1": (1,)}, "returned a dict; return a list of triples"),
        (X, r"returned a Tensor of shape \(5,\); return a list of triples"),
        (dim_partitioner(), "returned a TensorDimensionPartitioner; return a list of triples"),
        ((0, (1,), {}), r"^triple 0 of partitioner .*returns is an int; return a list of triples"),
        ([(0, (), {}), None], "^triple 1 of partitioner .* is None; return"),
        ([(0, (1,))], "^triple 0 of .* is a tuple of 2; return a list of triples"),
        ([(0, (), {}, 1)], "^triple 0 of .* is a tuple of 4; return"),
        (
            [(0, (), {}), (3, (), {})],
            r"^the worker in triple 1 of .*returns: .*destination 3.*'wor",
        ),
        ([("nobody", (), {})], "^the worker in triple 0 of .*: could not find .*'nobody'"),
        ([(-1, (), {})], "^the worker in triple 0 of .*: could not find"),
    ],
)
def test_what_is_no_list_of_triples_is_told(returned: Any, text: str) -> None:
    def returns() -> Any:
        return returned

    with pytest.raises(ConfigurationError, match=text) as caught:
        cut(returns)
    assert isinstance(caught.value, (ValueError, RuntimeError))


@cases(
    ("triple", "text"),
    [
        ((None, (), {}), "^the worker in triple 0 of .* is None; pass the rank or the name"),
        ((True, (), {}), "^the worker in triple 0 of .* is a bool; pass the rank or the name"),
        ((X[0], (), {}), r"^the worker in triple 0 of .* is a Tensor of shape \(\); pass"),
        ((0, X, {}), r"^args in triple 0 of .* is a Tensor of shape \(5,\); pass a tuple"),
        ((0, 1, {}), "^args in triple 0 of .* is an int; pass a tuple such as"),
        ((0, {"x": 1}, {}), "^args in triple 0 of .* is a dict; pass a tuple"),
        ((0, (), [1]), "^kwargs in triple 0 of .* is a list of 1; pass a dict whose keys"),
        (
            (0, (), {1: 2}),
            "^kwargs in triple 0 of .* is a dict; pass a dict whose keys are strings",
        ),
    ],
)
def test_a_triple_of_other_types_is_told(triple: Any, text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text) as caught:
        cut(lambda: [triple])
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("partitioner", [1.5, True, [batch_partitioner], X, object(), b"worker1"])
def test_what_is_neither_a_function_nor_a_worker_is_told(partitioner: Any) -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"^partitioner is an? .*; pass a function"
    ) as caught:
        cut(partitioner, (X,))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("partitioner", [3, -1, "nobody"])
def test_a_worker_that_is_not_there_is_told(partitioner: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^partitioner: .*the group has 'worker0' \(0\)"):
        cut(partitioner, (X,))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (X, None, r"^args is a Tensor of shape \(5,\); pass a tuple such as \(x, y\) or \(x,\)"),
        ("text", None, "^args is a str; pass a tuple"),
        ((), [1], "^kwargs is a list of 1; pass a dict"),
        ((), {1: 2}, "^kwargs is a dict; pass a dict whose keys are strings"),
    ],
)
@pytest.mark.parametrize("partitioner", [None, 0, in_reverse])
def test_arguments_of_other_types_are_told(
    partitioner: Any, args: Any, kwargs: Any, text: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        cut(partitioner, args, kwargs)


def broken(*args: Any) -> Any:
    yield 0, args, {}
    raise LookupError("no such task")


def test_an_error_of_the_partitioner_is_raised_as_it_is_with_a_note_whose_it_is() -> None:
    with pytest.raises(LookupError, match="no such task") as caught:
        cut(broken, (X,))
    if sys.version_info >= (3, 11):
        [note] = caught.value.__notes__
        assert note.startswith("raised by partitioner ")
        assert note.endswith("broken")


def test_before_there_is_a_group_ranks_stand_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchweft.engine.worker.current.here", None)
    stay_outside(monkeypatch, 2, rank=1)
    assert [part[0] for part in cut(None, (X,)).parts] == [0, 1]
    assert cut(None).parts == [(1, (), {})]
    assert cut(7, (1,)).parts == [(7, (1,), {})]
