"""Tests norms of single gradients, and their combination."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchweft.errors import ConfigurationError
from torchweft.optim.clipping import check_norms, norm, norm_of, on_host

TYPES = [1.0, 2.0, 3.5, math.inf]


@pytest.mark.parametrize("norm_type", TYPES)
def test_nothing_has_norm_zero(norm_type: float) -> None:
    empty = torch.zeros(4, 2).to_sparse(1)
    assert norm(empty, norm_type).item() == 0
    assert norm_of([], norm_type).item() == 0


def test_scalars_of_several_devices_come_to_the_host_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each device is waited for once; tensors on the CPU stand for those of a GPU."""
    waits = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: waits.append(self.shape) or cpu(self))
    scalars = [torch.tensor(float(number)) for number in range(4)]
    assert on_host(scalars) == scalars
    assert waits == []
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert [scalar.item() for scalar in on_host(scalars)] == [0.0, 1.0, 2.0, 3.0]
    assert waits == [(4,)]
    assert on_host([]) == []


@pytest.mark.parametrize(
    "given",
    [(-1, 2), (math.nan, 2), (1, 0), (1, -2), (1, math.nan), ("1", 2), (1, "inf"), (None, 2)],
)
def test_norms_that_cannot_be_used_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"_norm is|norm_type is"):
        check_norms(*given)
