"""Tests which measurements there can be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchweft.pipeline.partition import LayerProfile, PartitionError, Profile


@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
@pytest.mark.parametrize(
    "field",
    "forward_seconds backward_seconds activation_bytes saved_bytes weight_bytes fixed_bytes "
    "optimizer_ratio".split(),
)
def test_costs_are_finite_and_not_negative(field: str, value: float) -> None:
    numbers: dict[str, Any] = dict.fromkeys(
        "forward_seconds backward_seconds activation_bytes saved_bytes weight_bytes".split(), 0
    )
    with pytest.raises(PartitionError, match=f"layer 'fc' has {field}={value}; it must be finite"):
        LayerProfile(name="fc", **{**numbers, field: value})


def test_a_profile_has_layers_and_a_batch() -> None:
    with pytest.raises(PartitionError, match="no layers"):
        Profile((), 1)
    with pytest.raises(PartitionError, match="batch_size=0"):
        Profile((LayerProfile("a", 0, 0, 0, 0, 0),), 0)


def test_optimizer_state_is_rounded_up() -> None:
    assert LayerProfile("a", 0, 0, 0, 0, 5, optimizer_ratio=0.5).optimizer_bytes == 3
    assert LayerProfile("a", 0, 0, 0, 0, 5).optimizer_bytes == 0
