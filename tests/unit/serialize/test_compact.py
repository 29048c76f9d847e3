"""Tests round trips of small plain values; unusual values are left to the general encoding."""

from __future__ import annotations

import math
import struct
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from torchweft.errors import ProtocolError
from torchweft.serialize import compact

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def encode(values: Any) -> bytes | None:
    return compact.encode(values, [])


def decode(data: bytes) -> list[Any]:
    return compact.decode(data, 0, [])


def round_trip(*values: Any) -> list[Any]:
    data = encode(values)
    assert data is not None
    return compact.decode(b"head" + data, 4, [])


@given(st.lists(PLAIN, max_size=5))
def test_plain_values_come_back(values: list[Any]) -> None:
    data = encode(values)
    if data is not None:  # Deep nesting is left to the general encoding.
        assert decode(data) == values


@given(st.lists(PLAIN, min_size=1, max_size=3))
def test_types_come_back(values: list[Any]) -> None:
    data = encode(values)
    if data is not None:
        assert repr(decode(data)) == repr(values)


def test_special_numbers_come_back() -> None:
    nan, infinite, zero = round_trip(math.nan, -math.inf, -0.0)
    assert math.isnan(nan)
    assert infinite == -math.inf
    assert math.copysign(1.0, zero) == -1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3), (1,) * 8])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    [received] = round_trip(tensor)
    assert received.dtype == dtype
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)
    assert not received.requires_grad


def test_a_received_tensor_has_writable_memory_of_its_own() -> None:
    tensor = torch.arange(4)
    data = encode((tensor, torch.ones(2)))
    assert data is not None
    first, second = decode(data)
    again, _ = decode(data)
    first += 1
    assert torch.equal(tensor, torch.arange(4))
    assert torch.equal(again, tensor)
    assert torch.equal(second, torch.ones(2))
    assert first.untyped_storage().nbytes() == first.nbytes


def test_a_part_of_a_larger_tensor_takes_its_part_only() -> None:
    whole = torch.arange(1000.0)
    [received] = round_trip(whole[10:12])
    assert received.tolist() == [10.0, 11.0]
    assert received.untyped_storage().nbytes() == 8


def test_tensors_in_containers_come_back() -> None:
    [received] = round_trip({"state": [torch.ones(2), (torch.zeros(1), 5)]})
    assert torch.equal(received["state"][0], torch.ones(2))
    assert torch.equal(received["state"][1][0], torch.zeros(1))
    assert received["state"][1][1] == 5


def test_tensors_that_require_grad_are_named_on_both_sides() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True) * 2
    sent: list[torch.Tensor] = []
    data = compact.encode((first, 5, second, torch.zeros(1)), sent)
    assert data is not None
    assert [id(tensor) for tensor in sent] == [id(first), id(second)]
    places: list[int] = []
    received = compact.decode(data, 0, places)
    assert places == [0, 2]
    assert torch.equal(received[0], first)
    assert torch.equal(received[2], second)
    # A leaf stays a leaf; the layer above makes a placeholder for the computed tensor.
    assert [received[place].requires_grad for place in places] == [True, False]


def test_inside_of_a_container_they_are_left_to_the_general_way() -> None:
    assert encode(([torch.ones(2, requires_grad=True)],)) is None


def test_an_integer_that_requires_grad_is_an_error() -> None:
    data = encode((torch.ones(2),))
    assert data is not None
    damaged = bytes([1, compact.GRAD_TENSOR, 5, *data[3:]])
    with pytest.raises(ProtocolError):
        decode(damaged)


shared_tensor = torch.ones(4)
shared_list = [1]
cyclic: list[Any] = []
cyclic.append(cyclic)
with_attribute = torch.ones(2)
with_attribute.note = "x"  # type: ignore[attr-defined]


class Number(int):
    """A subclass of int."""


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        with_attribute,
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(3, 3).t()[:2],
        torch.ones(4)[::2],
        torch.empty(0),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch._neg_view(torch.ones(2)),  # type: ignore[attr-defined]
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.zeros(compact.TENSOR_LIMIT_BYTES + 1, dtype=torch.uint8),
        [shared_tensor[:2], shared_tensor[2:]],
        [shared_tensor, shared_tensor],
        [shared_list, shared_list],
        cyclic,
        2**63,
        -(2**63),
        Number(5),
        "\ud800",
        "x" * 100_000,
        bytearray(b"x"),
        {1, 2},
        print,
        [0] * 256,
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_unusual_is_left_to_the_general_way(value: Any) -> None:
    assert encode((value,)) is None
    assert encode(([1, (value,)],)) is None


@given(st.binary(max_size=60))
@settings(max_examples=500)
def test_any_bytes_are_values_or_a_protocol_error(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        pass


@given(st.data())
@settings(max_examples=300)
def test_damaged_values_are_values_or_a_protocol_error(data: st.DataObject) -> None:
    whole = encode((torch.ones(2, 3), [1, "text"], {"key": 2.5}))
    assert whole is not None
    damaged = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged[place] = data.draw(st.integers(0, 255))
    for sent in (damaged, whole[:place], whole + bytes(damaged[:1])):
        try:
            decode(bytes(sent))
        except ProtocolError:
            pass


def test_bytes_that_are_left_over_are_an_error() -> None:
    data = encode((1,))
    assert data is not None
    with pytest.raises(ProtocolError, match="too many"):
        decode(data + b"\0")


def test_more_bytes_than_are_ever_sent_this_way_are_refused_unread() -> None:
    many = struct.pack("<BBI", 1, compact.BYTES, 1 << 17) + bytes(1 << 17)
    with pytest.raises(ProtocolError, match="too many"):
        decode(many)
