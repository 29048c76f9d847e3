from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from torchweft.channel.table import (
    EMPTY_TABLE,
    BufferEntry,
    BufferTable,
    ChannelKind,
    SharedHandle,
    decode_table,
    encode_table,
)
from torchweft.errors import ProtocolError

INLINE, STREAM, CMA, SHM, STRIPED, CUDA_IPC, RDMA = ChannelKind
LIMIT = 1 << 50
MIXED = (
    BufferEntry(INLINE, 10),
    BufferEntry(CMA, 2000, 0x7000),
    BufferEntry(STREAM, 300),
    BufferEntry(SHM, 2000, 0, 7),
)

_addresses = st.integers(1, (1 << 64) - 1)
_followers = st.builds(
    BufferEntry, st.sampled_from([INLINE, STREAM]), st.integers(0, 1 << 40), st.just(0), st.just(0)
)
_tags = st.integers(0, (1 << 64) - 1)
_fetched = st.builds(
    BufferEntry, st.sampled_from([CMA, SHM, STRIPED]), st.integers(1, 1 << 40), _addresses, _tags
)


def _following(entries: tuple[BufferEntry, ...]) -> list[int]:
    return [entry.size_bytes for entry in entries if entry.kind in (INLINE, STREAM)]


@given(st.integers(0, (1 << 64) - 1), st.lists(_followers | _fetched, max_size=8), _fetched)
def test_a_table_survives(token: int, others: list[BufferEntry], fetched: BufferEntry) -> None:
    entries = (*others, fetched)
    data = encode_table(token, entries)
    assert decode_table(data, _following(entries), LIMIT) == BufferTable(token, entries)


_handles = st.builds(
    SharedHandle,
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(min_size=64, max_size=64),
)


@given(st.lists(_followers | _fetched, max_size=4), _tags, st.lists(_handles, max_size=3))
def test_handles_of_device_memory_survive(
    others: list[BufferEntry], tag: int, handles: list[SharedHandle]
) -> None:
    entries = (BufferEntry(CUDA_IPC, 9, 0, tag), *others)
    data = encode_table(1, entries, handles)
    table = decode_table(data, _following(entries), LIMIT)
    assert table == BufferTable(1, entries, tuple(handles))
    for end in range(1, len(data)):
        with pytest.raises(ProtocolError):
            decode_table(data[:end], _following(entries), LIMIT)
    with pytest.raises(ProtocolError, match="handles"):
        decode_table(data + b"\0", _following(entries), LIMIT)


_descriptions = st.builds(
    SharedHandle,
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=9),
)


@given(st.lists(_followers | _fetched, max_size=4), st.lists(_descriptions, max_size=3))
def test_descriptions_of_slabs_survive(
    others: list[BufferEntry], slabs: list[SharedHandle]
) -> None:
    entries = (BufferEntry(RDMA, 9, 1), *others)
    data = encode_table(1, entries, slabs)
    table = decode_table(data, _following(entries), LIMIT)
    assert table == BufferTable(1, entries, tuple(slabs))
    for end in range(1, len(data)):
        with pytest.raises(ProtocolError):
            decode_table(data[:end], _following(entries), LIMIT)
    with pytest.raises(ProtocolError, match="descriptions"):
        decode_table(data + b"\0", _following(entries), LIMIT)


def test_a_table_that_fetches_nothing_is_empty() -> None:
    assert encode_table(3, []) == b""
    assert encode_table(3, [BufferEntry(INLINE, 10), BufferEntry(STREAM, 300)]) == b""
    assert decode_table(b"", [10, 300], LIMIT) is EMPTY_TABLE


def test_the_layout_is_the_documented_one() -> None:
    head = struct.pack("<QI", 5, 1)
    assert encode_table(5, [BufferEntry(CMA, 9, 16)]) == head + struct.pack("<BQQQ", 2, 9, 16, 0)


@given(st.binary(max_size=80))
def test_noise_is_refused_or_read(data: bytes) -> None:
    try:
        table = decode_table(data, [], LIMIT)
    except ProtocolError:
        return
    assert encode_table(*table) == data


@cases(
    ("entries", "complaint"),
    [
        ([(7, 10, 0, 0)], "channel 7"),
        ([(5, 0, 0, 0), (0, 10, 0, 0)], "empty buffer .* by CUDA_IPC"),
        ([(5, 9, 0, 0), (0, 10, 0, 0)], "lists no handles"),
        ([(6, 9, 0, 0), (0, 10, 0, 0)], "lists no descriptions"),
        ([(6, 9, 0, 4), (0, 10, 0, 0)], "has the tag 4"),
        ([(6, 9, 0, 0), (5, 9, 0, 0), (0, 10, 0, 0)], "both device memory and slabs"),
        ([(2, 10, 0, 0)], "CMA has no address"),
        ([(1, 10, 5, 0)], "STREAM is at 0x5"),
        ([(0, 10, 0, 5)], "INLINE is at 0x0"),
        ([(2, 0, 5, 0)], "empty buffer .* by CMA"),
        ([(3, 0, 5, 0)], "empty buffer .* by SHM"),
        ([(2, LIMIT, 5, 0), (3, 1, 5, 0)], "limit"),
        ([(0, 10, 0, 0)], "should have been empty"),
        ([(0, 11, 0, 0), (2, 1, 5, 0)], "announces 1 buffers of 11 bytes"),
        ([(2, 1, 5, 0)], "1 of 10 bytes came"),
    ],
)
def test_contradictions_are_refused(
    entries: list[tuple[int, int, int, int]], complaint: str
) -> None:
    body = b"".join([struct.pack("<BQQQ", *entry) for entry in entries])
    with pytest.raises(ProtocolError, match=complaint):
        decode_table(struct.pack("<QI", 1, len(entries)) + body, [10], LIMIT)


def test_every_truncation_is_refused() -> None:
    data = encode_table(7, MIXED)
    for end in range(1, len(data)):
        with pytest.raises(ProtocolError):
            decode_table(data[:end], [10, 300], LIMIT)
    with pytest.raises(ProtocolError):
        decode_table(data + b"\0", [10, 300], LIMIT)


def test_the_error_of_a_refusal_holds_no_view_that_is_in_use() -> None:
    """Older Pythons crash when the collector clears such a view: python/cpython#77894."""
    with pytest.raises(ProtocolError) as caught:
        decode_table(memoryview(struct.pack("<QIBQQQ", 1, 1, 9, 0, 0, 0)), [], LIMIT)
    for entry in caught.traceback:
        for value in entry.frame.f_locals.values():
            if isinstance(value, memoryview):
                value.release()  # Raises BufferError if the view is in use.
