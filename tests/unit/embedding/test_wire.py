"""The form of values in messages: bounds of its errors, its size, and other forms refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import examples
from torchweft.embedding import InputError, Wire
from torchweft.embedding.wire import Form, decode, encode, row_bytes
from torchweft.errors import ConfigurationError

FORMS: list[Form] = ["fp16", "bf16", "int8"]
DTYPES = [torch.float32, torch.float64]
SMALLEST = {"fp16": 2.0**-25, "bf16": 2.0**-134, "int8": 1e-44}
RELATIVE = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def size_of(payload: Any) -> int:
    parts = payload if isinstance(payload, tuple) else (payload,)
    return sum(part.numel() * part.itemsize for part in parts)


def bounds_of(values: Tensor, form: Form) -> Tensor:
    """Returns the largest error of each value, as the page states it."""
    if form == "int8":
        largest = values.abs().amax(1, keepdim=True).expand_as(values)
        return largest / 254 * (1 + 1e-6) + SMALLEST[form]
    return values.abs() * RELATIVE[form] + SMALLEST[form]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(0, 5),
    dim=st.integers(1, 9),
    exponent=st.integers(-30, 4),
    seed=st.integers(0, 1000),
)
def test_errors_are_within_the_bounds_and_sizes_are_counted(
    form: Form, dtype: torch.dtype, rows: int, dim: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator, dtype=dtype) * 10.0**exponent
    payload = encode(values, form)
    found = decode(payload, form, dtype)
    assert found.dtype == dtype
    kept = values.abs() <= 65_504 if form == "fp16" else torch.ones_like(values, dtype=torch.bool)
    error = (found.double() - values.double()).abs()
    assert bool((error <= bounds_of(values.double(), form))[kept].all())
    assert size_of(payload) == rows * row_bytes(form, dim, dtype)
    assert torch.equal(decode(encode(values, form), form, dtype), found)  # nothing is random


@pytest.mark.parametrize("form", [None, *FORMS])
def test_zeros_and_numbers_that_the_form_has_are_exact(form: Form | None) -> None:
    values = torch.tensor([[0.0, 0.0, 0.0], [127.0, -64.0, 1.0], [-0.0, 127.0, -127.0]])
    assert torch.equal(decode(encode(values, form), form, torch.float32), values)


@pytest.mark.parametrize("form", FORMS)
def test_values_without_a_number_stay_visible_and_large_ones_are_cut(form: Form) -> None:
    infinite, nothing = float("inf"), float("nan")
    values = torch.tensor([[1.0, infinite], [nothing, 1.0], [1.0, 2.0], [-1e30, 1e30]])
    found = decode(encode(values, form), form, torch.float32)
    if form == "int8":
        assert bool(found[:2].isnan().all())
    else:
        assert bool(found[0, 1] == infinite)
        assert bool(found[1, 0].isnan())
    assert found[2].tolist() == pytest.approx([1.0, 2.0], abs=0.01)
    largest = 65_504 if form == "fp16" else pytest.approx(1e30, rel=0.01)
    assert found[3].tolist() == [
        -largest if form == "fp16" else pytest.approx(-1e30, rel=0.01),
        largest,
    ]


def test_ties_go_to_the_even_neighbour() -> None:
    between = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5]])
    found = decode(encode(between, "int8"), "int8", torch.float32)
    assert found.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0]]
    halves = torch.tensor([[2049.0, 2051.0]])  # between neighbours that are 2 apart
    assert decode(encode(halves, "fp16"), "fp16", torch.float32).tolist() == [[2048.0, 2052.0]]


ROWS = torch.zeros(2, 3)
OTHERS: list[tuple[Form, Any]] = [
    ("fp16", ROWS),
    ("fp16", ROWS[0].half()),
    ("bf16", ROWS.half()),
    ("bf16", "rows"),
    ("int8", ROWS.to(torch.int8)),
    ("int8", (ROWS.to(torch.int8), torch.ones(2))),
    ("int8", (ROWS.to(torch.int8), torch.ones(3, 1))),
    ("int8", (ROWS, torch.ones(2, 1))),
    ("int8", (None, None)),
]


@pytest.mark.parametrize(("form", "payload"), OTHERS)
def test_another_form_is_refused(form: Form, payload: Any) -> None:
    with pytest.raises(
        InputError, match=f"server 'a' was sent values of .* for t; .* take '{form}'"
    ) as caught:
        decode(payload, form, torch.float32, "a", "t")
    assert (caught.value.server, caught.value.table) == ("a", "t")


@pytest.mark.parametrize("form", ["fp8", "float16", torch.float16, 8])
@pytest.mark.parametrize("name", ["pulled", "pushed"])
def test_a_form_that_there_is_not_is_refused(name: str, form: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}=.* use one of None, 'fp16', 'bf16'"):
        Wire(**{name: form})
