"""Optimizers of this process beside parameters that are trained elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from torchweft.errors import ConfigurationError
from torchweft.optim.moved import Moved


def _trained(parameter: torch.nn.Parameter) -> SGD:
    parameter.grad = torch.ones_like(parameter)
    return SGD([parameter], lr=0.5)


def test_an_optimizer_of_moved_parameters_raises_at_its_first_step() -> None:
    here, there = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    moved = Moved("use pipe.optimizer")
    moved.add([there])
    with pytest.raises(ConfigurationError, match=r"1 parameters.*elsewhere.*use pipe\.optimizer"):
        SGD([there], lr=0.5).step()
    _trained(here).step()
    assert here.tolist() == [-0.5, -0.5]
    moved.close()


@pytest.mark.parametrize("is_closed", [True, False])
def test_optimizers_step_when_no_moved_parameters_are_left(is_closed: bool) -> None:
    here, there = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    moved = Moved("use pipe.optimizer")
    moved.add([there])
    optimizer = _trained(here)
    optimizer.step()
    if is_closed:
        moved.close()
    del moved
    for each in (optimizer, optimizer, SGD([there], lr=0.5)):
        each.step()
    assert here.tolist() == [-1.5, -1.5]
