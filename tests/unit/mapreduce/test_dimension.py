"""Tests cutting along a dimension, the parts that are made, and refused arguments."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from tests.unit.mapreduce.fake_group import join
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.ids import WorkerInfo
from torchweft.mapreduce.partitioners import (
    Part,
    TensorDimensionPartitioner,
    batch_partitioner,
    broadcast,
    checked_workers,
    dim_partitioner,
    exclusive_batch_partitioner,
    rank_of,
    with_note,
    without_lost,
)

Pair = namedtuple("Pair", "first second")
X = torch.arange(10.0).view(5, 2)


def indices(parts: list[Part]) -> list[tuple[int, list[int], float]]:
    """Returns worker, indices and weight of each part of an ``arange``."""
    return [(part[0], part[1][0].flatten().tolist(), part.weight) for part in parts]


@pytest.mark.parametrize(
    ("length", "workers", "expected"),
    [
        (5, [0, 1], [(0, [0, 1], 2), (1, [2, 3, 4], 3)]),
        (6, [4, 2, 7], [(4, [0, 1], 2), (2, [2, 3], 2), (7, [4, 5], 2)]),
        (8, [0, 1, 2], [(0, [0, 1], 2), (1, [2, 3], 2), (2, [4, 5, 6, 7], 4)]),
        (2, [0, 1, 2], [(0, [0], 1), (1, [1], 1)]),
        (1, [3], [(3, [0], 1)]),
        (0, [0, 1], []),
    ],
)
def test_each_worker_gets_one_part_and_the_last_one_gets_the_rest(
    length: int, workers: list[int], expected: list[Any]
) -> None:
    assert indices(dim_partitioner(0, workers=workers)(torch.arange(length))) == expected


@pytest.mark.parametrize("keepdim", [True, False])
def test_exclusive_parts_go_to_the_workers_in_turn(keepdim: bool) -> None:
    partitioner = dim_partitioner(0, exclusive=True, keepdim=keepdim, workers=[2, 0])
    parts = partitioner(torch.arange(5))
    assert indices(parts) == [(2, [0], 1), (0, [1], 1), (2, [2], 1), (0, [3], 1), (2, [4], 1)]
    assert {part[1][0].shape for part in parts} == {(1,) if keepdim else ()}


def test_the_length_may_be_that_of_dimensions_counted_from_the_last() -> None:
    [part, _] = dim_partitioner(-1, workers=[0, 1])(torch.zeros(3, 4), torch.zeros(4))
    assert [tensor.shape for tensor in part[1]] == [(3, 2), (2,)]


def test_all_workers_of_the_group_get_parts_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3, rank=1)
    assert [part[0] for part in batch_partitioner(X)] == [0, 1, 2]
    assert [part[0] for part in exclusive_batch_partitioner(X)] == [0, 1, 2, 0, 1]


def test_workers_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3)
    partitioner = dim_partitioner(0, workers=["worker2", 0])
    assert [part[0] for part in partitioner(X)] == [2, 0]
    with pytest.raises(ConfigurationError, match=r"^workers\[1\]: .*'worker9'.*the group has"):
        dim_partitioner(0, workers=[0, "worker9"])(X)


def test_a_lost_worker_gets_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3).find(1).declare_lost("a test")
    assert [(part[0], part.weight) for part in batch_partitioner(X)] == [(0, 2), (2, 3)]
    assert [part[0] for part in dim_partitioner(0, workers=[1, 2])(X)] == [2]


def test_arguments_are_trees_of_which_every_tensor_is_cut() -> None:
    tree = {
        "list": [X, (X, {"deep": X})],
        "pair": Pair(X, 1),
        "ordered": OrderedDict(b=X, a=2),
        "default": defaultdict(list, {3: X}),
    }
    first, second = dim_partitioner(0, workers=[0, 1])(X, tree, key=[X])
    head = second[1][1]
    assert torch.equal(second[2]["key"][0], X[2:])
    assert torch.equal(head["list"][1][1]["deep"], X[2:])
    assert torch.equal(head["pair"].first, X[2:])
    assert head["pair"].second == 1
    assert list(head["ordered"]) == ["b", "a"]
    assert type(head["default"]) is defaultdict
    assert first[1][1]["default"][3].shape == (2, 2)


def test_what_is_no_tensor_goes_to_every_part_as_the_same_object() -> None:
    values: list[Any] = [
        torch.nn.Linear(1, 1),
        [torch.nn.Linear(1, 1), {"a": 1}],
        object(),
        lambda: None,
        "text",
        [1, 2],
        {"lr": 0.1},
    ]
    for part in exclusive_batch_partitioner(X, *values, [X, values[5]], key=values[6]):
        assert all(got is value for got, value in zip(part[1][1:8], values, strict=True))
        assert part[1][8][1] is values[5]
        assert part[2]["key"] is values[6]


def test_what_is_marked_goes_to_every_part_as_the_same_object() -> None:
    state, theta = {"w": torch.zeros(3), "n": [torch.zeros(())]}, torch.zeros(7, 2)
    parts = dim_partitioner(0, workers=[0, 1])(
        broadcast(state), X, {"theta": broadcast(theta)}, key=broadcast(theta)
    )
    for part in parts:
        assert part[1][0] is state
        assert part[1][2]["theta"] is part[2]["key"] is theta
    assert [len(part[1][1]) for part in parts] == [2, 3]


@pytest.mark.parametrize("args", [(), (1, "text", [None]), (torch.nn.Linear(2, 2), {})])
def test_arguments_without_tensors_make_one_part_for_this_worker(
    monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...]
) -> None:
    join(monkeypatch, 3, rank=1)
    kwargs = {"key": 3}
    assert dim_partitioner(0, workers=[0, 2])(*args, **kwargs) == [(1, args, kwargs)]


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            (torch.zeros(4, 3),),
            {"y": torch.zeros(5)},
            r"args\[0\], a Tensor of shape \(4, 3\), and kwargs\['y'\], a Tensor of shape \(5,\), "
            r"differ in length along dimension 0.*broadcast",
        ),
        (
            (1, {"x": [X, torch.zeros(4)]}, X),
            {},
            r"args\[1\]\['x'\]\[0\], .* and args\[1\]\['x'\]\[1\], a Tensor of shape \(4,\)",
        ),
        (
            (torch.nn.Parameter(torch.zeros(3, 2)), X),
            {},
            r"args\[0\], a Parameter of shape \(3, 2\), and args\[1\], .*broadcast",
        ),
        (
            ([1, "a"], broadcast(X), Pair(2, torch.zeros(()))),
            {},
            r"^args\[2\].second, a Tensor of shape \(\), has no dimension 0 .*broadcast",
        ),
    ],
)
def test_tensors_that_cannot_be_cut_alike_are_told(
    args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        batch_partitioner(*args, **kwargs)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_not_there_is_told(dim: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"has no dimension {dim} to be cut along"):
        dim_partitioner(dim)(X)


@pytest.mark.parametrize("dim", [0.0, "0", None, True, X])
def test_a_dimension_that_is_no_number_is_told(dim: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^dim is .*; pass the number of a dimension"):
        dim_partitioner(dim)


@pytest.mark.parametrize("make", [TensorDimensionPartitioner, dim_partitioner])
def test_parts_of_several_indices_keep_the_dimension(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="keepdim=False needs exclusive=True"):
        make(0, keepdim=False)


cases = st.fixed_dictionaries(
    {
        "shape": st.lists(st.integers(0, 5), min_size=1, max_size=3),
        "exclusive": st.booleans(),
        "keepdim": st.booleans(),
        "workers": st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
        "seed": st.integers(0, 99),
    }
)


def by_hand(length: int, workers: list[int], exclusive: bool) -> list[tuple[int, list[int]]]:
    """Deals indices out one by one; returns the worker and the indices of each part."""
    count = length if exclusive else min(length, len(workers))
    dealt: list[tuple[int, list[int]]] = []
    for number in range(count):
        dealt.append((workers[number % len(workers)], []))
    for index in range(length):
        each = 1 if exclusive else length // count
        dealt[min(index // each, count - 1)][1].append(index)
    return dealt


@settings(max_examples=examples(100), deadline=None)
@given(cases, st.data())
def test_parts_are_those_dealt_out_by_hand(case: dict[str, Any], data: st.DataObject) -> None:
    shape, workers = case["shape"], case["workers"]
    keepdim = case["keepdim"] or not case["exclusive"]
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(case["seed"]))
    y = torch.arange(x.numel()).view(shape)
    partitioner = dim_partitioner(
        dim, exclusive=case["exclusive"], keepdim=keepdim, workers=workers
    )
    parts = partitioner(x, 7, key={"y": [y]})
    expected = by_hand(x.size(dim), workers, case["exclusive"])
    assert [part[0] for part in parts] == [worker for worker, _ in expected]
    assert [part.weight for part in parts] == [len(own) for _, own in expected]
    assert sum(part.weight for part in parts) == x.size(dim)
    assert sorted(chain(*(own for _, own in expected))) == list(range(x.size(dim)))
    for part, (_, own) in zip(parts, expected, strict=True):
        for whole, piece in ((x, part[1][0]), (y, part[2]["key"]["y"][0])):
            wanted = whole.index_select(dim, torch.tensor(own))
            assert torch.equal(piece, wanted if keepdim else wanted.squeeze(dim))
        assert part[1][1] == 7
    if parts:
        join_again = torch.cat if keepdim else torch.stack
        whole_dim = dim if keepdim or dim >= 0 else dim + x.dim()
        assert torch.equal(join_again([part[1][0] for part in parts], whole_dim), x)


@pytest.mark.parametrize("travel", [copy.copy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_part_that_travelled_has_its_weight(travel) -> None:  # type: ignore[no-untyped-def]
    arrived = travel(Part(1, (2,), {"k": 3}, weight=4.0))
    assert type(arrived) is Part
    assert (tuple(arrived), arrived.weight) == ((1, (2,), {"k": 3}), 4.0)


def test_marks_do_not_add_up() -> None:
    w = torch.zeros(2)
    assert broadcast(broadcast(w)).value is w
    assert broadcast({"w": broadcast(w)}).value == {"w": w}


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_an_error_that_takes_no_attributes_stays_as_it_is() -> None:
    error = Frozen(5)
    assert with_note(error, "first") is error
    assert not hasattr(error, "__notes__")


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


def test_a_tensor_that_torch_cannot_cut_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"layout torch\.sparse_coo cannot be cut"):
        batch_partitioner(X.to_sparse())
