"""Tests round trips of values by both encoders, and bytes that encode no such values."""

from __future__ import annotations

import enum
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.free_encoder import Made, pack_freely
from tests.tables import cases
from tests.unit.engine.codec import admitted
from tests.unit.engine.codec.trips import tensor_trip
from torchweft.engine.codec import reducers, values
from torchweft.engine.codec import values as tags
from torchweft.engine.codec.objects import pack, pack_plain, unpack
from torchweft.engine.codec.reading import make_reader
from torchweft.errors import (
    CallError,
    LaunchError,
    ProtocolError,
    RendezvousTimeout,
    SerializationError,
    WorkerLost,
)
from torchweft.ids import ReferenceId

pytestmark = pytest.mark.usefixtures("twin")


def trip(value: Any) -> Any:
    packed = pack_plain(value, main_by_name=True)
    tensors = tensor_trip(*packed.tensors)
    if not packed.payload:
        return tensors[0] if tensors else None
    return values.decode(packed.payload, tensors, packed.externals)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(1 << 200), max_value=1 << 200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """Returns the types in a value: 1, 1.0 and True are equal, as are 0.0 and -0.0."""
    if isinstance(value, dict):
        return [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(typed(each)) for each in value)
    if isinstance(value, (list, tuple)):
        return type(value), [typed(each) for each in value]
    return type(value), repr(value)


def test_errors_of_weft_are_plain() -> None:
    for error in (
        CallError("no", worker="ps", call="f", elapsed_s=1.5),
        WorkerLost("gone", worker="ps", since=1.0, cause="end of file"),
        RendezvousTimeout("late", missing=(1, 3), elapsed_s=2.5),
        LaunchError("worker 2 died", worker="ps", exit_code=-9),
    ):
        arrived = trip((error,))[0]
        assert type(arrived) is type(error)
        assert (str(arrived), vars(arrived)) == (str(error), vars(error))


# Tensors


TABLE = torch.arange(12.0).reshape(3, 4)


OTHER_KINDS: dict[str, Callable[[], Tensor]] = {
    "compressed": lambda: TABLE.to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(TABLE, 0.5, 3, torch.quint8),
    "quantised by channel": lambda: torch.quantize_per_channel(
        TABLE, torch.ones(3), torch.zeros(3, dtype=torch.int64), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "meta": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_tensors_of_other_kinds_are_refused_with_what_to_send(kind: str) -> None:
    with pytest.raises(SerializationError, match="dense equivalent"):
        pack_plain([OTHER_KINDS[kind]()], main_by_name=True)


@pytest.mark.parametrize(
    ("indices", "shape", "is_coalesced"),
    [
        ([[0, 1 << 40]], (3,), False),
        ([[0, -1]], (3,), False),
        ([[1, 1]], (3,), True),
        ([[1, 0]], (3,), True),
        ([[0, 1]], (3, 3), False),
        ([[0]], (3,), False),
        ([[0, 1]], (-3,), False),
    ],
)
def test_a_sparse_tensor_that_lies_is_refused(
    indices: list[list[int]], shape: tuple[int, ...], is_coalesced: bool
) -> None:
    made = torch.tensor(indices)
    name = b"torchweft.engine.codec.reducers:_sparse_coo"
    arguments = pack_plain((made, torch.ones(2), shape, is_coalesced), main_by_name=True)
    content = payload(counted(tags.MADE, len(name)), name, arguments.payload)
    with pytest.raises(ProtocolError):
        values.decode(content, arguments.tensors, ())


def test_the_indices_of_a_sparse_tensor_cannot_be_changed_afterwards() -> None:
    indices = torch.tensor([[0, 1]])
    made = reducers._sparse_coo(indices, torch.ones(2), (3,), True)
    indices.fill_(1 << 40)
    assert made.to_dense().tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "name", ["detach", "grad", "_backward_hooks", "__class__", "copy", "clear"]
)
def test_attributes_do_not_hide_what_a_class_has(name: str) -> None:
    attribute = counted(tags.TEXT, len(name)) + name.encode() + NONE
    of_tensor = bytes((tags.ATTRIBUTED,)) + counted(tags.TENSOR, 0)
    of_dict = counted(tags.ORDERED, 0)
    contents = [of_tensor] if hasattr(Tensor, name) else []
    contents += [of_dict] if hasattr(OrderedDict, name) else []
    for content in contents:
        with pytest.raises(ProtocolError, match="would hide"):
            values.decode(
                payload(content, counted(tags.DICTIONARY, 1), attribute), [torch.ones(1)], ()
            )


# Values that are not plain


class Color(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    first: int
    second: int


class Named(dict):  # type: ignore[type-arg]
    pass


class MyTensor(Tensor):
    pass


@cases(
    "value",
    [
        admitted.Model(),
        Color.RED,
        Pair(1, 2),
        Named(),
        np.array([object()]),
        np.zeros(1, dtype=[("x", "i4")]),
        bytearray(2),
        range(3),
        ValueError("x"),
        threading.Lock(),
        lambda: 1,
        admitted.Model().scale,
        admitted.half,
        torch.ones(2).as_subclass(MyTensor),
        nn.Linear(1, 1),
        object(),
    ],
)
def test_anything_else_is_refused_with_its_place_and_type(value: Any) -> None:
    call = ((1, {"deep": [value]}), {})
    with pytest.raises(SerializationError) as caught:
        pack_plain(call, main_by_name=True)
    text = str(caught.value)
    assert "args[1]['deep'][0]" in text
    assert type(value).__name__ in text or "__self__" in text
    assert "strict" in text or "lock" in text
    assert not isinstance(value, np.ndarray) or f"no numpy.ndarray of dtype {value.dtype};" in text


@cases(
    "call",
    [
        ("_array", ("O", (1,), bytes(8), "C")),
        ("_array", ("i4,O", (1,), bytes(16), "C")),
        ("_array", ("f8", (1 << 40,), bytes(8), "C")),
        ("_array", ("f8", (1,), bytes(16), "C")),
        ("_array", ("f8", (1,), "a text", "C")),
        ("_array", (8, (1,), bytes(8), "C")),
        ("_scalar", ("O", bytes(8))),
        ("_scalar", ("f8", bytes(4))),
        ("_array", ("f4", (1,), torch.ones(1, requires_grad=True).to_sparse(), "C")),
        ("_array", ("f4", (1,), 1, "C")),
        ("_array", ("O", (1,), torch.zeros(8, dtype=torch.uint8), "C")),
        ("_array", ("f8", (2,), torch.zeros(8, dtype=torch.uint8), "C")),
        ("_array", ("f8", (1,), torch.zeros(16, dtype=torch.uint8), "C")),
        ("_array", ("f8", (1,), torch.zeros(1), "C")),
        (
            "_array",
            ("f8", (1 << 50,), torch.zeros(1, dtype=torch.uint8).expand(8 << 50), "C"),
        ),
        ("_path", (3, True)),
        ("_dtype_named", ("O",)),
    ],
)
def test_false_parts_of_arrays_and_paths_are_refused(call: tuple[str, Any]) -> None:
    packed = pack_freely(Made(f"torchweft.engine.codec.reducers:{call[0]}", call[1]))
    with pytest.raises(ProtocolError):
        unpack(packed.payload, packed.tensors, packed.externals)


def test_nesting_has_a_limit() -> None:
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(SerializationError, match="nested too deeply"):
        pack_plain((deep,), main_by_name=True)


# Invalid bytes


def payload(*parts: bytes) -> bytes:
    return b"".join(parts)


def counted(tag: int, count: int) -> bytes:
    return struct.pack("<BI", tag, count)


NONE = bytes((tags.NONE,))


@cases(
    "content",
    [
        payload(),
        payload(bytes((200,))),
        payload(NONE, NONE),
        payload(bytes((tags.INTEGER,)), b"1234567"),
        payload(bytes((tags.FLOAT,)), b"1234567"),
        payload(bytes((tags.COMPLEX,)), b"123456789012345"),
        payload(bytes((tags.HOME,)), bytes(23)),
        payload(bytes((tags.HOME,)), bytes(24)),
        payload(counted(tags.BIG_INTEGER, 9), b"1"),
        payload(bytes((values.PICKLE,))),
        payload(counted(tags.TEXT, 1 << 31)),
        payload(counted(tags.TEXT, 1), b"\xff"),
        payload(counted(tags.LIST, 0xFFFFFFFF)),
        payload(counted(tags.TUPLE, 0xFFFFFFFF)),
        payload(counted(tags.TUPLE, 2), NONE),
        payload(counted(tags.TUPLE, 1), NONE, NONE),
        payload(counted(tags.TUPLE, 1), counted(tags.TENSOR, 1 << 31)),
        payload(counted(tags.SET, 1), counted(tags.LIST, 0)),
        payload(counted(tags.DICTIONARY, 1), counted(tags.LIST, 0), NONE),
        payload(counted(tags.AGAIN, 0)),
        payload(counted(tags.TENSOR, 0)),
        payload(counted(tags.REFERENCE, 0)),
        payload(counted(tags.TORCH, 4), b"load"),
        payload(bytes((tags.SIZE,)), counted(tags.TEXT, 1), b"x"),
        payload(bytes((tags.ATTRIBUTED,)), NONE, counted(tags.DICTIONARY, 0)),
        payload(counted(tags.MADE, 9), b"os:system", counted(tags.TUPLE, 0)),
        payload(counted(tags.MADE, 20), b"torchweft.ids:ReferenceId", counted(tags.TUPLE, 0)),
        payload(counted(tags.MADE, 20), b"torchweft.ids:ReferenceId", NONE),
        payload(counted(tags.LIST, 1) * 10_000, NONE),
        payload(*[bytes((tags.ATTRIBUTED,))] * 10_000),
    ],
)
def test_malformed_bytes_are_a_protocol_error(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        values.decode(content, (), ())


def test_an_error_is_made_of_errors_of_weft_only() -> None:
    name = b"torchweft.errors:_rebuild_with_fields"
    content = payload(
        counted(tags.MADE, len(name)),
        name,
        counted(tags.TUPLE, 3),
        counted(tags.NAME, 12),
        b"posix:system",
        counted(tags.TEXT, 4),
        b"true",
        counted(tags.DICTIONARY, 0),
    )
    with pytest.raises(ProtocolError, match="makes an error of"):
        values.decode(content, (), ())


def test_a_value_is_not_taken_for_a_pickle() -> None:
    assert max(each for name, each in vars(tags).items() if _is_tag(name, each)) < values.PICKLE
    assert pack_plain((1,), main_by_name=True).payload[0] == tags.TUPLE
    assert pack((1,), main_by_name=True).payload[0] == tags.TUPLE
    assert pack((1, object()), main_by_name=True).payload[0] == values.PICKLE
    payload = pack_plain((1, [2]), main_by_name=True).payload
    for read in (unpack, make_reader(["torch"], False, "ps").unpack):
        assert read(payload, [], []) == (1, [2])


_LIMITS = (
    *("PICKLE", "DEPTH_LIMIT", "UNFOLDING", "UNFOLDED_FLOOR_BYTES", "CONTAINER_BYTES"),
    "KEYS_AT_ONCE",
)


def _is_tag(name: str, value: object) -> bool:
    is_public = name.isupper() and not name.startswith("_")
    return is_public and type(value) is int and name not in _LIMITS


def test_every_tag_has_a_reader_and_a_number_of_its_own() -> None:
    numbers = [each for name, each in vars(tags).items() if _is_tag(name, each)]
    assert sorted(numbers) == list(range(len(values._READERS)))


# Values that both encoders take


def encoded(given: Any) -> tuple[bytes | None, list[Tensor]]:
    tensors: list[Tensor] = []
    return values.encode(given, tensors, True), tensors


EXACT = SCALARS | st.sampled_from([admitted.add, admitted.Model, torch.add, int, len])
NESTED = st.recursive(
    EXACT | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=5)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3).map(OrderedDict)
        | st.sets(st.text(max_size=40) | st.integers(), max_size=5)
        | st.frozensets(st.text(max_size=8), max_size=3)
    ),
    max_leaves=20,
)


@given(NESTED)
def test_values_come_back_as_by_the_encoder_for_strict_workers(given: Any) -> None:
    payload, tensors = encoded(given)
    assert payload is not None or has_repeated(given)
    if payload is not None:
        arrived = values.decode(payload, tensors, ())
        assert arrived == given
        assert typed(arrived) == typed(given)
        assert payload == values.Encoder(True, ()).encode(given)


def has_repeated(given: Any) -> bool:
    """Whether a value holds an object twice, as Hypothesis may."""
    seen: set[int] = set()
    kept: list[Any] = [given]
    for each in kept:
        if isinstance(each, (tuple, frozenset, str, bytes)) and each:
            if id(each) in seen:
                return True
            seen.add(id(each))
        if isinstance(each, dict):
            kept += [*each.keys(), *each.values()]
        elif isinstance(each, (tuple, list, set, frozenset)):
            kept += each
    return False


def test_references_that_go_home_travel() -> None:
    home = ReferenceId(1, -2, 1 << 40)
    wanted = object()
    payload = values.encode((1, wanted), [], True, lambda value: home if value is wanted else None)
    assert payload is not None
    arrived: list[ReferenceId] = []

    def come_home(reference: ReferenceId) -> str:
        arrived.append(reference)
        return "home"

    assert values.decode(payload, (), (), come_home=come_home) == (1, "home")
    assert arrived == [home]
    assert type(arrived[0]) is ReferenceId
    for reader in (None, make_reader(["torch"], False, "ps"), make_reader(None, True, "ps")):
        read = unpack if reader is None else reader.unpack
        assert read(payload, (), (), come_home) == (1, "home")
        with pytest.raises(ProtocolError, match="reference where there can be none"):
            read(payload, (), ())
    assert values.encode((1, wanted), [], True) is None


class Number(int):
    """A subclass of int."""


class Mine(dict):  # type: ignore[type-arg]
    """A subclass of dict."""


with_attribute = torch.ones(2)
with_attribute.note = "x"  # type: ignore[attr-defined]
hiding: OrderedDict[str, int] = OrderedDict(a=1)
hiding.items = 5  # type: ignore[method-assign, assignment]


@cases(
    "value",
    [
        Number(5),
        Mine(a=1),
        hiding,
        object(),
        lambda: 1,
        admitted.Model().scale,
        with_attribute,
        torch.ones(2).as_subclass(MyTensor),
    ],
)
def test_any_other_value_is_left_to_pickle(value: Any) -> None:
    assert encoded(value)[0] is None
    assert encoded((1, torch.ones(1), {"key": [value]}, "text"))[0] is None
