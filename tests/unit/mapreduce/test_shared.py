from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.unit.mapreduce import lone_worker
from torchweft import extending, rpc
from torchweft.errors import ArgumentTypeError
from torchweft.mapreduce import shared
from torchweft.mapreduce.shared import Shared, Slot


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with lone_worker.joined():
        yield


def made(function: Any, *values: Any) -> rpc.RRef[Shared]:
    """Returns a reference to a shared object, made as the caller of a map makes it."""
    packed = extending.Packed.of((function, list(values)), [extending.this_worker()])
    return rpc.remote("worker0", shared.make, (packed.payload, packed.tensors, 1))


def run(reference: rpc.RRef[Any], *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync("worker0", shared.run, (tuple(reference.id), args, kwargs, (0, 1), None))


def test_slots_travel() -> None:
    slot = pickle.loads(pickle.dumps(Slot(3)))
    assert type(slot) is Slot
    assert slot.number == 3


def collect(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def test_values_come_where_their_slots_are() -> None:
    reference = made(collect, "first", ["second", {"third": 3}])
    assert run(reference, Slot(0), 1, [Slot(1)], name={"a": Slot(0)}) == (
        ("first", 1, [["second", {"third": 3}]]),
        {"name": {"a": "first"}},
    )
    assert run(made(collect), 1, a=2) == ((1,), {"a": 2})


def add_to(value: Tensor, other: Tensor) -> Tensor:
    value += 1
    other += 1
    return value + other


def test_each_part_has_copies_of_all_tensors() -> None:
    common, own = torch.zeros(2), torch.zeros(2)
    reference = made(add_to, common)
    for _ in range(2):
        assert run(reference, Slot(0), own).tolist() == [2, 2]
    assert common.tolist() == own.tolist() == [0, 0]


def parameters_of(model: nn.Module) -> list[bool]:
    return [isinstance(each, nn.Parameter) for each in model.parameters()]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_parameters_stay_such(is_recorded: bool) -> None:
    reference = made(parameters_of, nn.Linear(2, 2))
    with torchweft.autograd.context() if is_recorded else torch.no_grad():
        assert run(reference, Slot(0)) == [True, True]


def test_copies_stay_in_the_graph_of_a_context() -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    reference = made(torch.mul, weight)
    with torchweft.autograd.context() as context_id:
        total = run(reference, Slot(0), weight).sum() + run(reference, Slot(0), 10.0).sum()
        torchweft.autograd.backward(context_id, [total])
        assert torchweft.autograd.get_gradients(context_id)[weight].tolist() == [14, 16]


def test_without_a_context_they_are_leaves() -> None:
    weight = nn.Parameter(torch.ones(2))
    result = run(made(torch.mul, weight), Slot(0), 2)
    result.sum().backward()
    assert weight.grad is None


async def later(value: Any) -> Any:
    return value


def test_functions_that_are_not_done_when_they_return() -> None:
    assert run(made(later, [1, 2]), Slot(0)) == [1, 2]


def no_object() -> Shared:
    raise KeyError("no object")


def test_an_object_that_could_not_be_made() -> None:
    with pytest.raises(KeyError, match="no object"):
        run(rpc.remote("worker0", no_object))


@pytest.mark.parametrize("what", [shared.run, shared.content])
def test_nobody_gets_at_anything_else(what: Any) -> None:
    reference = rpc.remote("worker0", list, ((1, 2),))
    given: tuple[Any, ...] = (tuple(reference.id),)
    with pytest.raises(ArgumentTypeError, match="sent to a list"):
        rpc.rpc_sync(
            "worker0", what, (*given, (), {}, (0, 1), None) if what is shared.run else given
        )


def test_an_object_is_made_of_that_of_another_worker() -> None:
    parent = made(collect, torch.ones(2))
    child = rpc.remote("worker0", shared.pull, (parent,))
    (found,), _ = run(child, Slot(0))
    assert found.tolist() == [1, 1]
    with pytest.raises(KeyError, match="no object"):
        run(rpc.remote("worker0", shared.pull, (rpc.remote("worker0", no_object),)))
