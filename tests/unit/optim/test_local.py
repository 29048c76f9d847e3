"""Tests the local optimizer of an owner, with made-up gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.optim.references import reference
from torchweft.engine.threads.device_streams import new_guard
from torchweft.optim.local import GroupPart, LocalOptimizer


def part(group: int, numbers: list[int], parameters: list[Tensor], **options: Any) -> GroupPart:
    held = [reference(0, number, value) for number, value in zip(numbers, parameters, strict=True)]
    return GroupPart(group, options, numbers, held)


def make(*parts: GroupPart, kind: Any = torch.optim.SGD, **options: Any) -> LocalOptimizer:
    return LocalOptimizer(lambda groups: kind(groups, **options), parts, new_guard())


def ones(count: int) -> list[Tensor]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_a_step_uses_the_gradients_given_and_leaves_grad_alone() -> None:
    with_grad, without, not_stepped = parameters = ones(3)
    mine = with_grad.grad = torch.full((2,), 5.0)
    not_stepped_grad = not_stepped.grad = torch.full((2,), 5.0)
    optimizer = make(part(0, [0, 1, 2], parameters), lr=1.0)
    optimizer.step({with_grad: torch.full((2,), 0.25), without: torch.full((2,), 0.5)}, {})
    assert [parameter[0].item() for parameter in parameters] == [0.75, 0.5, 1.0]
    assert with_grad.grad is mine
    assert without.grad is None
    assert not_stepped.grad is not_stepped_grad
    assert mine.tolist() == [5.0, 5.0]


def test_grad_is_as_before_also_after_a_step_that_failed() -> None:
    parameter = ones(1)[0]
    mine = parameter.grad = torch.full((2,), 5.0)
    optimizer = make(part(0, [0], [parameter]), kind=torch.optim.Adam)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step({parameter: torch.ones(2).to_sparse()}, {})
    assert parameter.grad is mine
