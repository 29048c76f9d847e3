from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.unit.mapreduce import lone_worker
from torchweft.errors import AutogradError
from torchweft.mapreduce import autograd

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with lone_worker.joined():
        yield


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0]))


def gradient_of(tensor: Tensor) -> list[float]:
    assert tensor.grad is not None
    found: list[float] = tensor.grad.tolist()
    return found


# Ownership of gradient memory


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("only", [False, True])
def test_what_the_program_has_given_stays_as_it_is(
    weight: nn.Parameter, only: bool, create_graph: bool
) -> None:
    given = torch.ones(2)
    inputs = [weight] if only else None
    for _ in range(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, weight, given, inputs=inputs, create_graph=create_graph)
    assert gradient_of(weight) == [2, 2]
    assert given.tolist() == [1, 1]


@pytest.mark.parametrize("only", [False, True])
def test_two_tensors_with_equal_gradients_do_not_share_them(
    weight: nn.Parameter, only: bool
) -> None:
    other = nn.Parameter(torch.zeros(2))
    with autograd.context() as context_id:
        total = (weight + other).square().sum()
        autograd.backward(context_id, total, inputs=[weight, other] if only else None)
    assert weight.grad is not None
    weight.grad.zero_()
    assert gradient_of(other) == [2, -4]


@pytest.mark.parametrize("only", [False, True])
def test_a_context_keeps_its_own_gradients(weight: nn.Parameter, only: bool) -> None:
    inputs = [weight] if only else None
    with autograd.context() as outer:
        autograd.backward(outer, weight.square().sum(), inputs=inputs)
        with autograd.context() as inner:
            autograd.backward(inner, (3 * weight).sum(), inputs=inputs)
            held = autograd.get_gradients(inner)[weight]
        assert autograd.get_gradients(outer)[weight].tolist() == [2, -4]
    assert gradient_of(weight) == [5, -1]
    assert weight.grad is not None
    weight.grad.zero_()
    assert held.tolist() == [3, 3]


def test_a_sparse_gradient_adds_up() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    for _ in range(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, table(torch.tensor([1])).sum())
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0]]


# Other properties of a pass


def test_a_failed_pass_leaves_gradients_as_they_were(weight: nn.Parameter) -> None:
    def refuse(gradient: Tensor) -> Tensor:
        raise ValueError("no gradient")

    with autograd.context() as context_id:
        total = (weight * 2).sum()
        autograd.backward(context_id, total, retain_graph=True)
        handle = weight.register_hook(refuse)
        with pytest.raises(AutogradError):
            autograd.backward(context_id, total)
        handle.remove()
    assert gradient_of(weight) == [2, 2]


# Threads


def scaled(weight: Tensor, row: Tensor) -> Tensor:
    return (weight * row).sum()
