"""Exact deltas: any words, any change, and nothing but the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.weights import DeltaError, delta
from torchweft.weights.delta import Delta, Words

ALL = 1 << 40


def words(*values: int) -> Words:
    return np.array(values, np.uint16)


def applied(found: Delta, base: Words) -> Words:
    new = np.full_like(base, 0xABCD)
    before = base.copy()
    delta.decode(found, base, new)
    assert np.array_equal(base, before)
    return new


def round_trip(base: Words, new: Words) -> Delta:
    found = delta.encode(base, new, ALL)
    assert found is not None
    assert np.array_equal(applied(found, base), new)
    return found


@st.composite
def versions(draw: st.DrawFn) -> tuple[Words, Words]:
    """Two versions, with near and distant changes of all sizes."""
    size = draw(st.integers(1, 2000))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    base = chance.integers(0, 1 << 16, size, np.uint16)
    new = base.copy()
    places = chance.choice(size, draw(st.integers(0, min(size, 50))), replace=False)
    span = draw(st.sampled_from([1, 127, 128, 1 << 15]))
    new[places] += chance.integers(-span, span, len(places), endpoint=True).astype(np.uint16)
    return base, new


@pytest.fixture(params=[7, 300, delta.BLOCK_WORDS], autouse=True)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_WORDS", request.param)


@settings(max_examples=examples(100), deadline=None)
@given(versions())
def test_a_delta_makes_the_new_version_bit_for_bit(pair: tuple[Words, Words]) -> None:
    round_trip(*pair)


def test_values_that_are_no_numbers_and_both_zeros_are_exact() -> None:
    base = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, float("nan"), float("-inf"), 3.0], dtype=torch.bfloat16)
    views = [each.view(torch.int16).numpy().view(np.uint16) for each in (base, new)]
    round_trip(views[0], views[1])


def test_a_delta_that_is_not_worth_it_is_not_made() -> None:
    chance = np.random.default_rng(0)
    base, new = (chance.integers(0, 1 << 16, 4000, np.uint16) for _ in range(2))
    assert delta.encode(base, new, base.nbytes // 2) is None


def test_a_delta_for_other_words_is_refused() -> None:
    base = np.arange(500, dtype=np.uint16)
    new = base.copy()
    new[[3, 77, 499]] += 1
    found = round_trip(base, new)
    other = base.copy()
    other[10] += 1
    with pytest.raises(DeltaError, match="checksum"):
        applied(found, other)


@settings(max_examples=examples(300), deadline=None)
@given(versions(), st.data())
def test_a_damaged_delta_is_refused(pair: tuple[Words, Words], data: st.DataObject) -> None:
    base, new = pair
    found = round_trip(base, new)
    code = bytearray(found.code)
    if data.draw(st.booleans(), "cut"):
        del code[data.draw(st.integers(0, len(code) - 1), "length") :]
    else:
        place = data.draw(st.integers(0, len(code) - 1), "place")
        code[place] ^= data.draw(st.integers(1, 255), "bits")
    try:
        assert np.array_equal(applied(Delta(bytes(code), found.checksum), base), new)
    except DeltaError:
        pass  # Bits of the last byte that belong to no code may differ.
