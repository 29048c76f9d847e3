"""Tests cutting along a dimension: which worker gets which indices, and refused arguments."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from itertools import chain
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tables import cases
from tests.thorough import examples
from tests.unit.mapreduce.fake_group import join, stay_outside
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce.partitioners import (
    Part,
    TensorDimensionPartitioner,
    batch_partitioner,
    broadcast,
    dim_partitioner,
    exclusive_batch_partitioner,
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


@pytest.mark.parametrize(("dim", "shape"), [(1, (3, 1, 4)), (-2, (3, 1, 4)), (-1, (3, 2, 1))])
def test_the_dimension_may_be_any(dim: int, shape: tuple[int, ...]) -> None:
    parts = dim_partitioner(dim, exclusive=True, workers=[0])(torch.zeros(3, 2, 4))
    assert {part[1][0].shape for part in parts} == {shape}


def test_the_length_may_be_that_of_dimensions_counted_from_the_last() -> None:
    [part, _] = dim_partitioner(-1, workers=[0, 1])(torch.zeros(3, 4), torch.zeros(4))
    assert [tensor.shape for tensor in part[1]] == [(3, 2), (2,)]


def test_all_workers_of_the_group_get_parts_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, 3, rank=1)
    assert [part[0] for part in batch_partitioner(X)] == [0, 1, 2]
    assert [part[0] for part in exclusive_batch_partitioner(X)] == [0, 1, 2, 0, 1]


def test_all_workers_are_those_of_the_launcher_before_there_is_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stay_outside(monkeypatch, 2)
    assert [part[0] for part in batch_partitioner(X)] == [0, 1]


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


def test_arguments_whose_tensors_are_all_marked_make_one_part_too() -> None:
    [part] = batch_partitioner(broadcast(X), key=[broadcast(X)])
    assert (part[0], part.weight) == (0, 1.0)
    assert part[1][0] is part[2]["key"][0] is X


def test_keywords_may_have_any_name() -> None:
    [part] = batch_partitioner(self=X, args=X, dim=3)
    assert list(part[2]) == ["self", "args", "dim"]


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


def test_a_tensor_that_torch_cannot_cut_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"layout torch\.sparse_coo cannot be cut"):
        batch_partitioner(X.to_sparse())


@pytest.mark.parametrize("dim", [0.0, "0", None, True, X])
def test_a_dimension_that_is_no_number_is_told(dim: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^dim is .*; pass the number of a dimension"):
        dim_partitioner(dim)


@pytest.mark.parametrize("make", [TensorDimensionPartitioner, dim_partitioner])
def test_parts_of_several_indices_keep_the_dimension(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="keepdim=False needs exclusive=True"):
        make(0, keepdim=False)


def test_the_class_does_not_keep_the_dimension_by_default() -> None:
    with pytest.raises(ConfigurationError, match="keepdim=False"):
        TensorDimensionPartitioner(0)
    assert TensorDimensionPartitioner(0, exclusive=True) == dim_partitioner(
        exclusive=True, keepdim=False
    )


def test_workers_are_checked_when_the_partitioner_is_made() -> None:
    with pytest.raises(ConfigurationError, match="workers is empty"):
        dim_partitioner(0, workers=[])


PARTITIONERS = [
    batch_partitioner,
    exclusive_batch_partitioner,
    dim_partitioner(-1, exclusive=True, keepdim=False, workers=["worker1", 0]),
]


@cases(
    "travel",
    [
        copy.deepcopy,
        lambda value: pickle.loads(cloudpickle.dumps(value)),
        *(
            lambda value, protocol=protocol: pickle.loads(pickle.dumps(value, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_a_partitioner_that_travelled_is_equal(travel: Any) -> None:
    for partitioner in PARTITIONERS:
        arrived = travel(partitioner)
        assert arrived == partitioner
        assert hash(arrived) == hash(partitioner)
        assert [part == other for part in PARTITIONERS for other in [arrived]].count(True) == 1


def test_a_partitioner_shows_its_options() -> None:
    assert repr(dim_partitioner(1, workers=["a", 0])) == (
        "TensorDimensionPartitioner(dim=1, exclusive=False, keepdim=True, workers=('a', 0))"
    )


@pytest.mark.parametrize(
    "partitioner",
    [
        dim_partitioner(0, workers=[0, 1]),
        dim_partitioner(0, exclusive=True),
        dim_partitioner(0, exclusive=True, keepdim=False),
    ],
)
def test_parts_stay_in_the_graph_at_any_order(partitioner: TensorDimensionPartitioner) -> None:
    weight = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def gradient(pieces: Any) -> Tensor:
        loss = sum(piece.pow(3).sum() for piece in pieces)
        [first] = torch.autograd.grad(loss, weight, create_graph=True)
        [second] = torch.autograd.grad(first.pow(2).sum(), weight)
        return second

    parts = [part[1][0] for part in partitioner(weight.tanh())]
    torch.testing.assert_close(gradient(parts), gradient([weight.tanh()]), rtol=1e-14, atol=1e-14)


def test_a_part_that_is_never_used_gets_no_gradient() -> None:
    weight = torch.ones(5, requires_grad=True)
    _, second = dim_partitioner(0, workers=[0, 1])(weight * 2)
    second[1][0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0, 2, 2, 2]


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
