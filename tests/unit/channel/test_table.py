from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.channel.table import (
    EMPTY_TABLE,
    BufferEntry,
    BufferTable,
    ChannelKind,
    decode_table,
    encode_table,
)
from weft.errors import ProtocolError

INLINE, STREAM, CMA = ChannelKind.INLINE, ChannelKind.STREAM, ChannelKind.CMA
LIMIT = 1 << 50
MIXED = (BufferEntry(INLINE, 10), BufferEntry(CMA, 2000, 0x7000), BufferEntry(STREAM, 300))

_addresses = st.integers(1, (1 << 64) - 1)
_followers = st.builds(
    BufferEntry, st.sampled_from([INLINE, STREAM]), st.integers(0, 1 << 40), st.just(0)
)
_pulled = st.builds(BufferEntry, st.just(CMA), st.integers(1, 1 << 40), _addresses)


def _following(entries: tuple[BufferEntry, ...]) -> list[int]:
    return [entry.size_bytes for entry in entries if entry.kind != CMA]


@given(st.integers(0, (1 << 64) - 1), st.lists(_followers | _pulled, max_size=8), _pulled)
def test_a_table_survives(token: int, others: list[BufferEntry], pulled: BufferEntry) -> None:
    entries = (*others, pulled)
    data = encode_table(token, entries)
    assert decode_table(data, _following(entries), LIMIT) == BufferTable(token, entries)


def test_a_table_that_pulls_nothing_is_empty() -> None:
    assert encode_table(3, []) == b""
    assert encode_table(3, [BufferEntry(INLINE, 10), BufferEntry(STREAM, 300)]) == b""
    assert decode_table(b"", [10, 300], LIMIT) is EMPTY_TABLE


def test_the_layout_is_the_documented_one() -> None:
    head = struct.pack("<QI", 5, 1)
    assert encode_table(5, [BufferEntry(CMA, 9, 16)]) == head + struct.pack("<BQQ", 2, 9, 16)


@given(st.binary(max_size=80))
def test_noise_is_refused_or_read(data: bytes) -> None:
    try:
        table = decode_table(data, [], LIMIT)
    except ProtocolError:
        return
    assert encode_table(*table) == data


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([(3, 10, 0)], "channel 3"),
        ([(2, 10, 0)], "CMA has address 0x0"),
        ([(1, 10, 5)], "STREAM has address 0x5"),
        ([(2, 0, 5)], "empty buffer"),
        ([(2, LIMIT, 5), (2, 1, 5)], "limit"),
        ([(0, 10, 0)], "should have been empty"),
        ([(0, 11, 0), (2, 1, 5)], "announces 1 buffers of 11 bytes"),
        ([(2, 1, 5)], "1 of 10 bytes came"),
    ],
)
def test_contradictions_are_refused(entries: list[tuple[int, int, int]], complaint: str) -> None:
    body = b"".join([struct.pack("<BQQ", *entry) for entry in entries])
    with pytest.raises(ProtocolError, match=complaint):
        decode_table(struct.pack("<QI", 1, len(entries)) + body, [10], LIMIT)


def test_every_truncation_is_refused() -> None:
    data = encode_table(7, MIXED)
    for end in range(1, len(data)):
        with pytest.raises(ProtocolError):
            decode_table(data[:end], [10, 300], LIMIT)
    with pytest.raises(ProtocolError):
        decode_table(data + b"\0", [10, 300], LIMIT)
