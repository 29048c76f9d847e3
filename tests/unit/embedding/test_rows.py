from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torchweft.embedding.rows import (
    Bags,
    Entries,
    distinct,
    pool,
    pooled,
    put,
    sort,
    sum_rows,
    summed,
    take,
)


def test_sorting_keeps_the_order_of_equal_numbers() -> None:
    found = sort(torch.tensor([5, 2, 5, 9, 2, 5]))
    assert found.unique.tolist() == [2, 5, 9]
    assert found.order.tolist() == [1, 4, 0, 2, 5, 3]
    assert found.starts.tolist() == [0, 2, 5]
    assert found.inverse().tolist() == [1, 0, 1, 2, 0, 1]
    assert [found.place(number) for number in range(4)] == [0, 2, 5, 6]
    nothing = sort(torch.tensor([], dtype=torch.int64))
    assert (nothing.inverse().tolist(), nothing.place(0)) == ([], 0)


@pytest.mark.parametrize("count", [1, 2, 8192, 40_000])
@pytest.mark.parametrize("largest", [3, 1000, 2**31 - 1])
@pytest.mark.parametrize("has_vector_sort", [True, False])
def test_sorting_of_any_length_and_type_is_the_same(
    count: int, largest: int, has_vector_sort: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchweft.embedding.rows._HAS_VECTOR_SORT", has_vector_sort)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_rows_are_copied_and_written(dim: int, dtype: torch.dtype) -> None:
    table = torch.randn(10, dim, dtype=dtype)
    before, rows = table.clone(), torch.tensor([7, 0, 9])
    for numbers in (rows, rows.int()):
        assert torch.equal(take(table, numbers), table[rows])
        assert torch.equal(take(table, numbers, into=torch.ones(5, dim, dtype=dtype)), table[rows])
    put(table, rows.int(), torch.ones(3, dim, dtype=dtype))
    before[rows] = 1
    assert torch.equal(table, before)
    put(table, rows[:0], torch.ones(0, dim, dtype=dtype))
    assert torch.equal(table, before)


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_of_entries_are_one_tensor(dtype: torch.dtype) -> None:
    numbers = NUMBERS.numbers(dtype)
    assert (numbers.dtype, len(numbers)) == (dtype, 12)
    found = Entries.of((numbers, 3))
    assert [each.tolist() for each in found] == [each.tolist() for each in NUMBERS]


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
