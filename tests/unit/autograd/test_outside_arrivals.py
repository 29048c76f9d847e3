"""Tests received tensors whose gradients cannot go back to the sender."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.autograd.outside import Arrivals, OutsideRecords
from torchweft.errors import AutogradError


def placed(warns: bool, *tensors: Any, context_id: int = 0) -> list[Any]:
    values = list(tensors)
    arrivals = Arrivals(OutsideRecords(0), warns)
    arrivals.place(values, range(len(values)), "worker1", 1, context_id, 0)
    return values


def test_a_pass_that_ends_in_one_raises_and_says_what_to_write() -> None:
    first, second = placed(False, torch.ones(2), torch.ones(3))
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(AutogradError, match=r"worker 'worker1' .* torchweft\.autograd") as caught:
        (first * leaf).sum().backward()
    assert caught.value.worker == "worker1"
    with pytest.raises(AutogradError):
        second.sum().backward()


def test_where_it_only_warns_it_is_a_leaf() -> None:
    arrivals = Arrivals(OutsideRecords(0), warns=True)
    values: list[Any] = [torch.ones(2), torch.ones(3)]
    arrivals.place(values, (0, 1), "worker1", 1, 0, 0)
    first, second = values
    with pytest.warns(RuntimeWarning, match="worker1"):
        (first * 2).sum().backward()
    assert torch.equal(first.grad, torch.full((2,), 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # It warns only once, and copying does not warn.
        second.sum().backward()
        copies: list[Tensor] = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    assert all(each.requires_grad for each in copies)
