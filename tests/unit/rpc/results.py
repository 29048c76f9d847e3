"""Values for tests of both twins, and their comparison."""

from __future__ import annotations

from collections import OrderedDict

import torch
from hypothesis import strategies as st
from torch import Tensor

TENSORS = st.sampled_from(
    [
        torch.arange(3),
        torch.ones(2, 2),
        torch.ones(4, 4).t(),
        torch.zeros(0),
        torch.tensor(True),
        torch.ones(2, dtype=torch.bfloat16),
    ]
).map(torch.clone)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=20)
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])])
    | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    """Whether two values are equal and of the same types, down to their tensors."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    return left == right
