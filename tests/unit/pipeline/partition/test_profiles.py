"""Tests profiles as values, as JSON and as tables."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import share
from torchweft.pipeline.partition import LayerProfile, PartitionError, Profile

SIZES = st.integers(0, 2**60)
SECONDS = st.floats(0, 1e6)


@given(
    st.builds(
        Profile,
        layers=st.lists(
            st.builds(
                LayerProfile,
                name=st.sampled_from(["0:Linear", "", '"\\\n', "Schicht ä"]),
                forward_seconds=SECONDS,
                backward_seconds=SECONDS,
                activation_bytes=SIZES,
                saved_bytes=SIZES,
                weight_bytes=SIZES,
                fixed_bytes=SIZES,
                optimizer_ratio=st.none() | st.floats(0, 8),
            ),
            min_size=1,
            max_size=4,
        ).map(tuple),
        batch_size=st.integers(1, 10**6),
    )
)
@settings(max_examples=share(300))
def test_json_keeps_everything(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this text is not JSON: Expecting"),
        ("[]", 'this JSON has the format None; expected "torchweft pipeline profile 1"'),
        ('{"format": "other"}', "this JSON has the format 'other'"),
        ('{"format": "torchweft pipeline profile 1"}', "is not a profile: KeyError"),
        (
            '{"format": "torchweft pipeline profile 1", "batch_size": 1, "layers": [{"nam": 1}]}',
            "is not a profile: TypeError",
        ),
        (
            '{"format": "torchweft pipeline profile 1", "batch_size": 1, "layers": []}',
            "the profile has no layers",
        ),
    ],
)
def test_other_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Profile.from_json(text)


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


def test_text() -> None:
    profile = Profile(
        (
            LayerProfile("0:Conv2d", 0.0123, 0.025, 2**21, 2**20, 900, 24),
            LayerProfile("fc:Linear", 1.5e-5, 0, 40, 2**19, 3 * 2**20),
        ),
        batch_size=32,
    )
    assert str(profile).splitlines() == [
        "Profile of 2 layers, batch of 32",
        "   layer      forward  backward    output     saved   weights  fixed",
        "0  0:Conv2d   12.3 ms   25.0 ms  2.00 MiB  1.00 MiB     900 B   24 B",
        "1  fc:Linear  15.0 µs         0      40 B   512 KiB  3.00 MiB      0",
        "   all        12.3 ms   25.0 ms  2.00 MiB  1.50 MiB  3.00 MiB   24 B",
    ]
    assert len(json.loads(profile.to_json())["layers"]) == 2


def test_optimizer_state_is_rounded_up() -> None:
    assert LayerProfile("a", 0, 0, 0, 0, 5, optimizer_ratio=0.5).optimizer_bytes == 3
    assert LayerProfile("a", 0, 0, 0, 0, 5).optimizer_bytes == 0
