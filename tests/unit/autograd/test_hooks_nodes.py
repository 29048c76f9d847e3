"""Tests prehooks of accumulating nodes: the context gets what they return."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.autograd.codec import PassMode
from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass


def backward(context: Context, root: Tensor) -> None:
    local = LocalPass(context, PassMode(retain_graph=True))
    local.start([root])
    local.work()
    local.close()


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
