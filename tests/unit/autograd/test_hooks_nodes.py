"""Tests hooks of accumulating nodes: they are called once, with the sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass

Seen = list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def watch(result: Tensor) -> Seen:
    """Registers two hooks on the accumulating node behind ``result``; returns their arguments."""
    assert result.grad_fn is not None
    node = result.grad_fn.next_functions[0][0]
    assert node is not None
    seen: Seen = []
    for _ in range(2):
        node.register_hook(lambda inputs, outputs: seen.append((inputs, outputs)))
    return seen


def backward(context: Context, root: Tensor) -> None:
    local = LocalPass(context, PassMode(retain_graph=True))
    local.start([root])
    local.work()
    local.close()


LEAVES = {
    torch.strided: lambda: torch.eye(2),
    torch.sparse_coo: lambda: torch.eye(2).to_sparse(),
    torch.sparse_csr: lambda: torch.eye(2).to_sparse_csr(),
    torch.jagged: lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
}


def sum_of(tensor: Tensor) -> Tensor:
    return (tensor.values() if tensor.is_nested else tensor.to_dense()).sum()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", LEAVES)
def test_hooks_are_called_after_the_gradient_is_there(layout: torch.layout) -> None:
    leaf = LEAVES[layout]().requires_grad_()
    doubled = leaf * 2
    context, seen = Context(1, 0), watch(doubled)
    backward(context, sum_of(doubled))
    assert len(seen) == 2
    for inputs, (gradient,) in seen:
        assert inputs == ()
        assert gradient is context.get_gradients()[leaf] or layout is not torch.strided
    assert leaf.grad is None


def test_a_leaf_that_several_messages_lead_to_has_its_hooks_called_once_with_the_sum() -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    first, second = leaf * 2, leaf * 3
    context, seen = Context(1, 0), watch(first)
    numbers = [context.record_send([value], 1) for value in (first, second)]
    local = LocalPass(context)
    for number in numbers:
        local.arrive(number, [torch.ones(2)])
        local.work()
    assert [outputs[0].tolist() for _, outputs in seen] == [[5.0, 5.0]] * 2


def test_prehooks_may_replace_the_gradient_that_the_context_gets() -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    doubled = leaf * 2
    assert doubled.grad_fn is not None
    node = doubled.grad_fn.next_functions[0][0]
    assert node is not None
    node.register_prehook(lambda gradients: (gradients[0] * 5,))
    context = Context(1, 0)
    backward(context, doubled.sum())
    assert context.get_gradients()[leaf].tolist() == [10.0, 10.0]
