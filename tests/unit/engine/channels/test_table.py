from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from torchweft.engine.channels.channel import Entry
from torchweft.engine.worker.tensor_messages import (
    FOLLOWS,
    BufferTable,
    decode_table,
    encode_table,
)
from torchweft.errors import ProtocolError

LIMIT = 1 << 50
MIXED = (
    Entry(FOLLOWS, 10),
    Entry(2, 2000, b"address"),
    Entry(FOLLOWS, 300),
    Entry(3, 2000, b""),
)

_followers = st.integers(0, 1 << 40).map(lambda size_bytes: Entry(FOLLOWS, size_bytes))
_fetched = st.tuples(st.integers(1, 255), st.integers(1, 1 << 40), st.binary(max_size=40)).map(
    lambda fields: Entry(*fields)
)


def _following(entries: tuple[Entry, ...]) -> list[int]:
    return [entry.size_bytes for entry in entries if entry.channel == FOLLOWS]


@given(st.integers(0, (1 << 64) - 1), st.lists(_followers | _fetched, max_size=8), _fetched)
def test_a_table_survives(token: int, others: list[Entry], fetched: Entry) -> None:
    entries = (*others, fetched)
    data = encode_table(token, entries)
    assert decode_table(data, _following(entries), LIMIT) == BufferTable(token, list(entries))


@cases(
    ("entries", "complaint"),
    [
        ([(5, 0, b""), (0, 10, b"")], "empty buffer"),
        ([(0, 10, b"x")], "has a handle"),
        ([(2, LIMIT, b""), (3, 1, b"")], "limit"),
        ([(0, 10, b"")], "should have been empty"),
        ([(0, 11, b""), (2, 1, b"")], "announces 1 buffers"),
        ([(2, 1, b"")], "1 of 10 bytes came"),
    ],
)
def test_contradictions_are_refused(entries: list[tuple[int, int, bytes]], complaint: str) -> None:
    body = b"".join([struct.pack("<BQH", *each[:2], len(each[2])) + each[2] for each in entries])
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
        decode_table(memoryview(struct.pack("<QIBQH", 1, 1, 9, 0, 0)), [], LIMIT)
    for entry in caught.traceback:
        for value in entry.frame.f_locals.values():
            if isinstance(value, memoryview):
                value.release()  # Raises BufferError if the view is in use.
