"""Gradients through maps, into ``.grad`` or returned, as with ``torch.autograd``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes import mapreduce_autograd_functions as functions
from torchweft import mapreduce, rpc
from torchweft.errors import ArgumentTypeError, AutogradError
from torchweft.launch import Cluster, Nursery
from torchweft.mapreduce import autograd

pytestmark = pytest.mark.keeps("threads", "descriptors")


@pytest.fixture(scope="module")
def workers(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=2, nursery=nursery) as group:
        yield group


together = pytest.mark.usefixtures("workers")
EACH = mapreduce.dim_partitioner(0, exclusive=True, keepdim=False)
DATA = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)


def leaf() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))


def mapped(weight: Tensor) -> Tensor:
    total: Tensor = mapreduce.remote_sync_call(
        functions.product,
        args=(mapreduce.broadcast(weight), DATA),
        partitioner=EACH,
        reducer=mapreduce.sum_reducer,
    )
    return total


@together
def test_backward_adds_to_what_is_there() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        autograd.backward(context_id, mapped(weight))
    first = weight.grad
    assert first is not None
    assert first.tolist() == [9, 12]
    with autograd.context() as context_id:
        autograd.backward(context_id, [mapped(weight)])
    assert weight.grad is first
    assert first.tolist() == [18, 24]


@together
def test_backward_twice_in_a_context_adds_each_pass_once() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        loss = mapped(weight)
        autograd.backward(context_id, loss, retain_graph=True)
        autograd.backward(context_id, loss)
        held = autograd.get_gradients(context_id)[weight]
    assert weight.grad is not None
    assert weight.grad.tolist() == held.tolist() == [18, 24]


@together
def test_a_loss_that_is_no_scalar_has_a_gradient_of_its_own() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        losses = torch.stack([mapped(weight), mapped(weight)])
        autograd.backward(context_id, losses, torch.tensor([1.0, 10.0], dtype=torch.float64))
    assert weight.grad is not None
    assert weight.grad.tolist() == [99, 132]


@together
def test_inputs_are_the_only_ones_with_gradients() -> None:
    weight, other = leaf(), leaf()
    with autograd.context() as context_id:
        loss = mapped(weight * other) + rpc.rpc_sync(
            "worker1", functions.with_own_weight, (weight,)
        )
        autograd.backward(context_id, loss, inputs=[weight, weight])
        assert rpc.rpc_sync("worker1", functions.gradient_of_weight, (context_id,)) is None
    assert other.grad is None
    assert weight.grad is not None
    assert weight.grad.tolist() == [11, -9]


@together
def test_other_workers_keep_gradients_of_theirs_in_the_context() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", functions.ask_for_weight, (weight,))
        autograd.backward(context_id, loss)
        there = rpc.rpc_sync("worker1", functions.gradient_of_weight, (context_id,))
        assert there is not None
        assert there.tolist() == [1, -1]
        assert rpc.rpc_sync("worker1", functions.grad_of_weight) is None
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 3]


@together
def test_grad_leaves_nothing_and_returns_the_same_again() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        loss = mapped(weight)
        for _ in range(2):
            (gradient,) = autograd.grad(context_id, loss, weight, retain_graph=True)
            assert gradient.tolist() == [9, 12]
        assert autograd.get_gradients(context_id) == {}
    assert weight.grad is None


@together
def test_the_order_of_arguments_of_torchopt_is_understood() -> None:
    weight, unused = leaf(), leaf()
    with autograd.context() as context_id:
        loss = mapped(weight)
        autograd.backward(context_id, loss, True)
        first, second = autograd.grad(context_id, loss, (weight, unused), True, True)
        assert second is None
        autograd.backward(context_id, loss, False, inputs=weight)
    assert first.tolist() == [9, 12]
    assert weight.grad is not None
    assert weight.grad.tolist() == [18, 24]


@together
def test_a_gradient_with_a_graph_can_be_differentiated() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        loss = mapped(weight**2)
        autograd.backward(context_id, loss, create_graph=True)
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        (second,) = autograd.grad(context_id, gradient.pow(2).sum(), weight)
    # The gradient is 2 s w, with s the sums of the columns.
    sums = torch.tensor([9.0, 12.0], dtype=torch.float64)
    assert torch.allclose(second, 8 * sums**2 * weight.detach())


@together
def test_parameters_of_a_module_stay_in_the_graph() -> None:
    module = nn.Linear(2, 1, dtype=torch.float64)
    with autograd.context() as context_id:
        loss = mapreduce.remote_sync_call(
            nn.Linear.forward, args=(module, DATA), reducer=mapreduce.mean_reducer
        )
        autograd.backward(context_id, loss.sum())
    assert module.weight.grad is not None
    assert module.weight.grad.shape == (1, 2)


@together
@pytest.mark.parametrize("function", [functions.steps_its_copy, functions.steps_a_deep_copy])
def test_an_optimizer_in_a_part_needs_leaves_of_its_own_and_the_error_says_so(
    function: Any,
) -> None:
    weight = leaf()
    with autograd.context(), pytest.raises((ValueError, RuntimeError)) as caught:
        mapreduce.remote_sync_call(function, args=(nn.ParameterList([weight]), DATA))
    assert any("module_clone(model, by='deepcopy')" in note for note in caught.value.__notes__)
    with autograd.context():
        found = mapreduce.remote_sync_call(
            functions.steps_a_clone, args=(nn.ParameterList([weight]), DATA), partitioner=EACH
        )
    for each, x in zip(found, DATA, strict=True):
        assert torch.equal(each, weight.detach() - 0.5 * x)


@together
def test_hooks_after_accumulation_see_the_sum() -> None:
    weight, seen = leaf(), []
    weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.tolist()))
    for _ in range(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, mapped(weight))
    assert seen == [[9, 12], [18, 24]]


@together
@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ((), AutogradError, "'inputs' argument cannot be empty"),
        ("x", ArgumentTypeError, r"inputs\[0\] is a str"),
        (torch.ones(2), AutogradError, "does not require grad"),
        (leaf() * 2, AutogradError, "is no leaf and has no .grad"),
    ],
)
def test_inputs_that_have_no_grad_are_told(inputs: Any, error: type[Exception], text: str) -> None:
    with autograd.context() as context_id:
        loss = mapped(leaf())
        with pytest.raises(error, match=text):
            autograd.backward(context_id, loss, inputs=inputs)


@together
def test_an_input_that_was_not_used_is_told() -> None:
    with autograd.context() as context_id:
        loss = mapped(leaf())
        with pytest.raises(AutogradError, match="not have been used in the graph: inputs"):
            autograd.grad(context_id, loss, leaf())


@together
def test_a_context_that_is_over_is_told() -> None:
    weight = leaf()
    with autograd.context() as context_id:
        loss = mapped(weight)
    with pytest.raises(AutogradError, match="Could not find autograd context"):
        autograd.backward(context_id, loss)
    assert weight.grad is None


@together
def test_distributed_autograd_is_available() -> None:
    assert autograd.is_available()
