"""The norm of averaged gradients of rows, against dense tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchweft.embedding.rows import Entries
from torchweft.hybrid.clipping import Stacks, norm_of_mean

ROWS, DIM = 8, 3


@given(
    st.lists(st.lists(st.lists(st.integers(0, ROWS - 1), max_size=6), max_size=3), min_size=1),
    st.sampled_from([1.0, 2.0, 3.5, math.inf]),
    st.integers(0, 2**31),
)
def test_it_is_that_of_the_dense_mean(
    of_trainers: list[list[list[int]]], norm_type: float, seed: int
) -> None:
    """Each trainer has some lookups, in one of two stacks, as values or as entries of bags."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.zeros(2, ROWS, DIM, dtype=torch.float64)
    stacks: list[Stacks] = []
    for lookups in of_trainers:
        found: Stacks = {}
        for place, ids in enumerate(lookups):
            rows, counts = torch.unique(torch.tensor(ids, dtype=torch.int64), return_counts=True)
            stack = place % 2
            if place == 1:  # Each row is in as many bags as it occurs.
                values = torch.randn(4, DIM, generator=generator, dtype=torch.float64)
                bags = torch.randint(0, 4, (len(ids),), generator=generator)
                dense[stack].index_add_(0, rows.repeat_interleave(counts), values[bags])
                numbers = Entries(rows, counts, bags).numbers(torch.int64)
                part = (numbers, len(rows), None, values)
                found.setdefault(stack, []).append(part)
            else:
                values = torch.randn(len(rows), DIM, generator=generator, dtype=torch.float64)
                dense[stack].index_add_(0, rows, values)
                found.setdefault(stack, []).append((rows, values))
        stacks.append(found)
    expected = torch.linalg.vector_norm(dense / len(of_trainers), norm_type)
    total = norm_of_mean(stacks, len(of_trainers), norm_type)
    assert float(total) == pytest.approx(float(expected), rel=1e-12, abs=1e-300)
