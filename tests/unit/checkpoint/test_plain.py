from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tables import cases
from torchweft.checkpoint.files import read_part, write_part
from torchweft.checkpoint.kinds import HostCopier, is_plain
from torchweft.errors import ArgumentTypeError

PLAIN = [
    None,
    True,
    2**80,
    2**2039 - 1,
    1.5,
    2j,
    "text",
    b"bytes",
    [1, (2, {3})],
    {"a": {1: "b"}},
    OrderedDict(a=1),
    Counter("aab"),
    torch.float32,
    torch.device("cuda:1"),
    torch.Size([1, 2]),
]


@cases("value", PLAIN)
def test_plain_values_are_copied_as_they_are(value: Any) -> None:
    copy = HostCopier("x").copy(value)
    assert copy == value
    assert type(copy) is type(value)
    assert is_plain(value)


def test_containers_are_copies() -> None:
    value = {"a": [1]}
    copy = HostCopier("x").copy(value)
    value["a"].append(2)
    assert copy == {"a": [1]}


def test_numbers_of_numpy_become_those_of_python() -> None:
    copy = HostCopier("x").copy([np.float64(0.1), np.int32(3), np.bool_(True)])
    assert copy == [0.1, 3, True]
    assert [type(each) for each in copy] == [float, int, bool]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (threading.Lock(), "x is a _thread.lock"),
        ({"a": [1, object()]}, r"x\['a'\]\[1\] is a builtins.object"),
        ({(1, object()): 1}, "x, a key,"),
        (np.ones(2), "x is a numpy.ndarray"),
        (type("Subclass", (dict,), {})(), "Subclass"),
    ],
    ids=["lock", "inside", "key", "array", "subclass"],
)
def test_anything_else_is_refused_with_its_place(value: Any, place: str) -> None:
    assert not is_plain(value)
    with pytest.raises(ArgumentTypeError, match=place):
        HostCopier("x").copy(value)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (np.datetime64("2020-01-01"), r"x is a datetime\.date"),
        (np.longdouble(1), r"x is a numpy\.longdouble"),
        (2**2039, "x is an int of 2,040 bits, and a snapshot holds at most 2,039"),
        ([1, -(2**9999)], r"x\[1\] is an int of 10,000 bits"),
        ({"a": b""}, r"x\['a'\] is b'', which"),
    ],
    ids=["date", "long double", "integer", "inside", "no bytes"],
)
def test_plain_values_that_could_not_be_read_are_refused(value: Any, place: str) -> None:
    with pytest.raises(ArgumentTypeError, match=place):
        HostCopier("x").copy(value)


@cases("value", PLAIN)
def test_plain_values_are_read_without_code(value: Any, tmp_path: Path) -> None:
    write_part(str(tmp_path / "part"), {"value": HostCopier("x").copy(value)})
    assert read_part(str(tmp_path / "part")) == {"value": value}


def test_tensors_are_copies_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    copy = HostCopier("x").copy([parameter * 2, parameter])
    assert [type(each) for each in copy] == [torch.Tensor] * 2
    assert not any(each.requires_grad for each in copy)
    with torch.no_grad():
        parameter.zero_()
    assert copy[1].tolist() == [1.0, 1.0]
    assert not is_plain(parameter)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(3, 1).expand(3, 4),
        torch.empty(0, 3),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["transposed", "expanded", "empty", "sparse", "bfloat16", "conjugated"],
)
def test_tensors_of_any_form_are_equal_copies(tensor: torch.Tensor) -> None:
    copy = HostCopier("x").copy(tensor)
    assert copy is not tensor
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy.to_dense(), tensor.to_dense())


def test_the_same_memory_is_copied_once_and_other_views_by_themselves() -> None:
    weight = torch.arange(6.0)
    copies = HostCopier("x").copy(
        {"a": weight, "b": weight.detach(), "c": weight[1:], "d": weight.reshape(2, 3)}
    )
    assert copies["a"] is copies["b"]
    pointers = {copies[key].data_ptr() for key in "acd"}
    assert len(pointers) == 3
    # A view is saved without the rest of its storage.
    assert copies["c"].untyped_storage().nbytes() == 20
