"""Tests hooks of several tensors in one pass: called once, when all gradients are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from torchweft.autograd.contexts import Context
from torchweft.autograd.local_pass import LocalPass


def gradient_bits(found: Any) -> list[bool]:
    return [each is not None for each in found]


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_separate_parts_of_a_pass_call_it_once() -> None:
    parts = [leaf() * 2, leaf() * 3]
    seen: list[Any] = []
    register_multi_grad_hook(parts, lambda found: seen.append(gradient_bits(found)))
    context = Context(1, 0)
    numbers = [context.record_send([part], 1) for part in parts]
    local = LocalPass(context)
    for number in numbers:
        assert not seen
        local.arrive(number, [torch.ones(2)])
        local.work()
    assert seen == [[True, True]]
    local.finish_hooks()
    assert len(seen) == 1


def test_it_waits_for_a_message_that_may_still_be_live_until_that_is_settled() -> None:
    for settles in (True, False):
        parts = [leaf() * 2, leaf() * 3]
        seen: list[Any] = []
        register_multi_grad_hook(parts, lambda found, to=seen: to.append(gradient_bits(found)))
        context = Context(1, 0)
        number, _ = [context.record_send([part], 1) for part in parts]
        local = LocalPass(context)
        local.arrive(number, [torch.ones(2)])
        local.work()
        assert not seen
        if settles:
            local.settle()
            local.work()
        else:
            local.finish_hooks()
        assert seen == [[True, False]]
