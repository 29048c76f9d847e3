"""Tests PyTorch's functions that read ``.grad`` where the gradients are in a context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter, utils
from torch.optim import SGD

from torchweft.autograd import refusals
from torchweft.autograd.contexts import Contexts
from torchweft.errors import ConfigurationError


class Holder:
    def __init__(self) -> None:
        self.contexts = Contexts(0)


@pytest.fixture
def parameter() -> Iterator[Parameter]:
    """Yields a parameter whose gradient is in a context."""
    holder, parameter = Holder(), Parameter(torch.zeros(2))
    refusals.watch(holder)
    context = holder.contexts.get_or_create(7)
    context.gradients.add_all([(parameter, torch.ones(2))], ())
    yield parameter
    holder.contexts.release(7)


def test_a_step_says_where_the_gradients_are(parameter: Parameter) -> None:
    optimizer = SGD([parameter], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"SGD finds no gradient.*context 7.*Distributed"):
        optimizer.step()
    refusals.leave_out(optimizer)
    optimizer.step()
    SGD([Parameter(torch.zeros(2))], lr=0.1).step()


def test_functions_that_clip_name_another_way(parameter: Parameter) -> None:
    with pytest.raises(ConfigurationError, match=r"torchweft\.optim\.clip_grad_norm_\(context_id"):
        utils.clip_grad_norm_([parameter], 1.0)
    with pytest.raises(ConfigurationError, match=r"clip_grad_value_ .*get_gradients\(context_id\)"):
        utils.clip_grad_value_([parameter], 1.0)
    with pytest.warns(RuntimeWarning, match="get_total_norm was called without gradients"):
        utils.get_total_norm([])
    with pytest.warns(UserWarning, match="empty generator"):
        utils.clip_grad_norm_((each for each in ()), 1.0)
