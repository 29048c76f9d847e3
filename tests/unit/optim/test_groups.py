"""Tests parameter groups as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.optim.references import reference
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.optim.states import read_groups

A, B, C = (reference(owner, number) for owner, number in ((1, 0), (2, 0), (1, 1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "params_rref is empty"),
        ([{"params": []}], "group 0 is empty"),
        ([{"lr": 0.1}], 'group 0 has no "params"'),
        ([A, B, reference(1, 0)], "parameters 0 and 2 are the same"),
        ([{"params": [A]}, {"params": [B, A]}], "parameters 0 and 2 are the same"),
    ],
)
def test_values_that_cannot_work_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_groups(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [torch.ones(1)],
            r"parameter 0 of group 0 is a Tensor, not an RRef; pass torchweft.RRef\(",
        ),
        ([A, 3], r"parameter 1 of group 0 is an int.*remote_parameters\(\)"),
        ([{"params": [A]}, B], "mixes dicts with a"),
        (torch.ones(1), "params_rref is a Tensor; pass a list of RRefs"),
        (A, "pass a list of RRefs"),
        ({"params": [A]}, "pass a list of RRefs"),
    ],
)
def test_types_that_cannot_work_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        read_groups(given)
