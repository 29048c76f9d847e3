from __future__ import annotations

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import cases
from tests.thorough import examples
from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize import table
from torchweft.serialize.table import (
    CODES,
    HOST,
    NO_BUFFER,
    PARAMETER,
    REAL_CODES,
    REQUIRES_GRAD,
    SHARED,
    STRIDED,
    Entry,
    device_code,
    device_of,
    dtype_of,
    extent,
    read,
    write,
)

entries = st.builds(
    lambda code, flags, shape, buffer, device: Entry(code, flags, shape, buffer, device),
    st.integers(0, 255),
    st.sampled_from([0, REQUIRES_GRAD, PARAMETER, REQUIRES_GRAD | PARAMETER]),
    st.lists(st.integers(1, 9), max_size=5).map(tuple),
    st.integers(0, 3),
    st.tuples(st.integers(0, 255), st.integers(0, 255)),
)


def fields(entry: Entry) -> list[object]:
    return [getattr(entry, name) for name in Entry.__slots__]


@settings(max_examples=examples(50))
@given(st.lists(entries, max_size=4), st.booleans())
def test_a_table_reads_as_it_was_written(written: list[Entry], strided: bool) -> None:
    if strided:
        for entry in written:
            entry.flags |= STRIDED | SHARED
            entry.offset, entry.strides = 7, tuple(range(len(entry.shape)))
    table = write(written, 4)
    read_back, buffer_count = read(memoryview(table))
    assert buffer_count == 4
    assert list(map(fields, read_back)) == list(map(fields, written))


def test_the_extent_reaches_to_the_last_element() -> None:
    assert extent((), ()) == 1
    assert extent((3, 4), (4, 1)) == 12
    assert extent((3, 4), (0, 5)) == 16
    assert Entry(0, STRIDED, (2, 2), 0, offset=5, strides=(1, 10)).end() == 5 + 12


MALFORMED = {
    "unknown flags": Entry(0, 64, (1,), 0),
    "shared without strides": Entry(0, SHARED, (1,), 0),
    "buffer beyond the last": Entry(0, 0, (1,), 1),
    "elements without a buffer": Entry(0, 0, (1,), NO_BUFFER),
    "a buffer for nothing": Entry(0, 0, (0,), 0),
    "a size beyond 63 bits": Entry(0, 0, (1 << 63,), 0),
    "a product beyond 63 bits": Entry(0, 0, (1 << 40, 1 << 40), 0),
    "a product hidden by a zero": Entry(0, 0, (1 << 40, 0, 1 << 40), NO_BUFFER),
    "an offset beyond 63 bits": Entry(0, STRIDED, (1,), 0, offset=1 << 63, strides=(1,)),
    "a stride beyond 63 bits": Entry(0, STRIDED, (1,), 0, strides=((1 << 64) - 1,)),
}


@cases("case", MALFORMED)
def test_a_malformed_entry_is_refused(case: str) -> None:
    with pytest.raises(ProtocolError):
        read(write([MALFORMED[case]], 1))


def test_a_table_of_another_length_is_refused() -> None:
    table = write([Entry(0, STRIDED, (2, 3), 0, strides=(1, 2)), Entry(0, 0, (4,), 1)], 2)
    read(table)
    for wrong in [table[:length] for length in range(1, len(table))] + [table + b"\0"]:
        with pytest.raises(ProtocolError):
            read(wrong)


NEWEST_KNOWN = (2, 15)
"""The newest torch whose dtypes all have numbers; dtypes of a later torch are refused by name."""


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= (NEWEST_KNOWN[0], NEWEST_KNOWN[1] + 1),
    reason="a torch that is newer than the numbers; its new dtypes are refused by name",
)
def test_every_dtype_with_plain_memory_has_a_number() -> None:
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = {"torch.bit"}  # torch's alias for uint1, which no tensor operation supports
    assert {dtype for dtype in known - quantised if str(dtype) not in left_out} <= set(CODES)
    assert {dtype_of(code) for code in CODES.values()} == set(CODES)
    assert all(dtype.is_complex for dtype in CODES.keys() - REAL_CODES.keys())


def test_numbers_do_not_change() -> None:
    # Workers of different versions exchange these numbers.
    assert [CODES[dtype] for dtype in (torch.bool, torch.float32, torch.bfloat16)] == [0, 7, 15]


def test_an_unknown_number_is_refused() -> None:
    with pytest.raises(ProtocolError, match="255"):
        dtype_of(255)


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = CODES[torch.float8_e5m2]
    without = [None if number == code else dtype for number, dtype in enumerate(table._DTYPES)]
    monkeypatch.setattr(table, "_DTYPES", tuple(without))
    with pytest.raises(SerializationError, match=r"torch\.float8_e5m2, which torch"):
        dtype_of(code)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    two = types.SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: two)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", "xpu:1"])
def test_a_device_that_is_here_is_found(device: str) -> None:
    assert device_of(device_code(torch.device(device)), 0, "w") == torch.device(device)


def test_the_host_needs_no_device() -> None:
    assert device_code(torch.device("cpu")) == device_code(torch.device("cpu", 0)) == HOST
    assert device_of(HOST, 0, "w") is None


@pytest.mark.usefixtures("two_devices")
def test_a_missing_device_says_what_is_here() -> None:
    with pytest.raises(SerializationError, match="'w' has only cuda:0, cuda:1") as caught:
        device_of(device_code(torch.device("cuda:2")), 4, "w")
    assert "tensor 4" in str(caught.value)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(SerializationError, match=r"meta.*\.cpu\(\)"):
        device_code(torch.device("meta"))
    with pytest.raises(ProtocolError):
        device_of((200, 0), 0, "w")
    with pytest.raises(SerializationError, match="no hpu device"):
        device_of(device_code(torch.device("hpu:0")), 0, "w")
