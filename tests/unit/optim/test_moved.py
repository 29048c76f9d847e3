"""Optimizers of this process beside parameters that are trained elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

from torchweft.errors import ConfigurationError
from torchweft.optim.states import Moved


def _trained(parameter: torch.nn.Parameter) -> SGD:
    parameter.grad = torch.ones_like(parameter)
    return SGD([parameter], lr=0.5)


def test_an_optimizer_of_moved_parameters_raises_at_its_first_step() -> None:
    here, there = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    moved = Moved("use pipe.optimizer")
    moved.add([there])
    with pytest.raises(
        ConfigurationError, match=r"SGD was given 1 parameters.*elsewhere.*use pipe"
    ):
        SGD([there], lr=0.5).step()
    _trained(here).step()
    assert here.tolist() == [-0.5, -0.5]
    moved.close()


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_clipping_moved_parameters_raises(clip: Callable[..., object]) -> None:
    moved = Moved("use pipe.clip_grad_norm_")
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    moved.add(parameters[:1])
    parameters[1].grad = torch.ones(2)
    for each in (parameters, iter(parameters), parameters[0]):
        with pytest.raises(ConfigurationError, match=r"use pipe\.clip_grad_norm_"):
            clip(each, 1.0)
    clip(parameters[1], 0.5)
    moved.close()
    clip(parameters, 0.5)


def test_clipping_what_is_beside_moved_parameters_warns_once() -> None:
    moved = Moved("call optimizer.clip_grad_norm_")
    dense = torch.nn.Parameter(torch.zeros(2))
    dense.grad = torch.ones(2)
    moved.add([torch.nn.Parameter(torch.zeros(2))])
    moved.add_beside([dense])
    with pytest.warns(RuntimeWarning, match=r"leaves out.*call optimizer\.clip") as caught:
        torch.nn.utils.clip_grad_norm_(dense, 1.0)
    assert caught[0].filename == __file__
    torch.nn.utils.clip_grad_norm_(dense, 1.0)
