from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import ProtocolError
from torchweft.serialize.table import (
    NO_BUFFER,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    STRIDED,
    Entry,
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


@settings(max_examples=50)
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


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_entry_is_refused(case: str) -> None:
    with pytest.raises(ProtocolError):
        read(write([MALFORMED[case]], 1))


def test_a_table_of_another_length_is_refused() -> None:
    table = write([Entry(0, STRIDED, (2, 3), 0, strides=(1, 2)), Entry(0, 0, (4,), 1)], 2)
    read(table)
    for wrong in [table[:length] for length in range(1, len(table))] + [table + b"\0"]:
        with pytest.raises(ProtocolError):
            read(wrong)
