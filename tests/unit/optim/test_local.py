"""Tests that the local optimizer of an owner leaves ``.grad`` as it was."""

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


def test_grad_is_as_before_also_after_a_step_that_failed() -> None:
    parameter = ones(1)[0]
    mine = parameter.grad = torch.full((2,), 5.0)
    optimizer = make(part(0, [0], [parameter]), kind=torch.optim.Adam)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step({parameter: torch.ones(2).to_sparse()}, {})
    assert parameter.grad is mine
