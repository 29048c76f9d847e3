"""Rows: sums, pooling, and their form in messages with its bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.thorough import examples
from torchweft.embedding import InputError, Wire
from torchweft.embedding.rows import (
    Bags,
    Entries,
    Form,
    decode,
    distinct,
    encode,
    pool,
    pooled,
    row_bytes,
    sort,
    sum_rows,
    summed,
)
from torchweft.errors import ConfigurationError


@pytest.mark.parametrize("count", [1, 2, 8192, 40_000])
@pytest.mark.parametrize("largest", [3, 1000, 2**31 - 1])
def test_sorting_of_any_length_and_type_is_the_same(count: int, largest: int) -> None:
    generator = torch.Generator().manual_seed(count)
    numbers = torch.randint(largest - 2, largest + 1, (count,), generator=generator)
    numbers[count // 2 :] = largest
    unique, inverse = torch.unique(numbers, return_inverse=True)
    order = sorted(range(count), key=numbers.tolist().__getitem__)
    for dtype in (torch.int32, torch.int64):
        found = sort(numbers.to(dtype))
        assert torch.equal(found.unique, unique.to(dtype))
        assert found.order.tolist() == order
        assert torch.equal(found.inverse(), inverse)
        assert torch.equal(distinct(numbers.to(dtype)), unique.to(dtype))


BAGS = Bags(torch.tensor([2, 0, 2, 1]), torch.tensor([0, 1, 1, 4]))  # one bag is empty twice
TRANSPOSE = Bags(torch.tensor([2, 2, 0, 2]), torch.tensor([0, 1, 2]))
WEIGHTS = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)


@pytest.mark.parametrize("has_weights", [False, True])
def test_pooling_has_all_derivatives_of_embedding_bag(has_weights: bool) -> None:
    bags, transpose = BAGS, TRANSPOSE
    if has_weights:
        bags = bags._replace(weights=WEIGHTS)
        transpose = transpose._replace(weights=WEIGHTS[torch.tensor([1, 3, 0, 2])])
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    found = pool(rows, bags, transpose)
    expected = functional.embedding_bag(
        bags.entries, rows, bags.offsets, mode="sum", per_sample_weights=bags.weights
    )
    assert torch.equal(found, expected)
    factors = torch.randn(4, 4, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((each * factors).sum(), rows, retain_graph=True)[0]
        for each in (found, expected)
    ]
    assert torch.allclose(*gradients, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: pool(x, bags, transpose), [rows])
    assert torch.autograd.gradgradcheck(lambda x: pool(x, bags, transpose).square(), [rows])


def dense(parts: list[Any]) -> Tensor:
    total = torch.zeros(10, 2)
    for rows, *entries, values in parts:
        if not entries:
            total.index_add_(0, rows, values)
            continue
        (rows, counts, numbers), weights = Entries.of((rows, *entries, values)), entries[1]
        chosen = values[numbers.long()]
        if weights is not None:
            chosen = chosen * weights[:, None]
        total.index_add_(0, rows.repeat_interleave(counts), chosen)
    return total


VALUES = (torch.tensor([1, 4, 9]), torch.randn(3, 2))
NUMBERS = Entries(
    torch.tensor([0, 4, 7]),
    torch.tensor([2, 1, 3]),
    torch.tensor([0, 1, 1, 2, 0, 1]),
)
ENTRIES = (NUMBERS.numbers(torch.int64), 3, None, torch.randn(3, 2))
WEIGHTED = (*ENTRIES[:2], torch.rand(6), ENTRIES[3])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_entries_may_be_bags_of_their_own(weights: Tensor | None) -> None:
    rows = torch.randn(3, 4, dtype=torch.float64)
    alone = pooled(rows, Bags(BAGS.entries, None, weights))
    assert torch.equal(alone, pooled(rows, Bags(BAGS.entries, torch.arange(4), weights)))


def test_empty_bags_are_zeros() -> None:
    none = torch.tensor([], dtype=torch.int64)
    assert torch.equal(
        pooled(torch.ones(2, 3), Bags(none, torch.zeros(2).long())), torch.zeros(2, 3)
    )
    assert pooled(torch.ones(2, 3), Bags(none, none)).shape == (0, 3)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    "parts",
    [
        [VALUES],
        [ENTRIES],
        [WEIGHTED],
        [VALUES, VALUES],
        [VALUES, ENTRIES, WEIGHTED],
        [],
    ],
    ids=len,
)
def test_gradients_of_several_parts_are_summed_by_row(parts: list[Any], size: int) -> None:
    chunks = [*summed(parts, size)]
    assert all(0 < len(rows) <= size for rows, _ in chunks)
    rows = [row for chunk, _ in chunks for row in chunk.tolist()]
    assert rows == sorted(set(rows))
    total = torch.zeros(10, 2)
    for chunk, values in chunks:
        total[chunk] = values
    assert torch.allclose(total, dense(parts), atol=1e-6)  # Rows may sum to almost nothing.
    if parts:
        rows_at_once, values = sum_rows(parts)
        assert torch.equal(total[rows_at_once], values)


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
