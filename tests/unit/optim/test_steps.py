"""Steps are seen by hooks of all optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchweft.optim import local


@pytest.fixture
def optimizer() -> Optimizer:
    """An optimizer whose parameter has a gradient."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return SGD([weight], lr=1.0)


def hooked_step(seen: list[str]) -> Callable[[Any], object]:
    return local.with_hooks(lambda optimizer: seen.append("step"))


def test_hooks_of_all_optimizers_run(optimizer: Optimizer) -> None:
    seen: list[str] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("after"))
    try:
        hooked_step(seen)(optimizer)
        hooked_step(seen)(optimizer)
    finally:
        handle.remove()
    hooked_step(seen)(optimizer)
    assert seen == ["step", "after", "step", "after", "step"]
