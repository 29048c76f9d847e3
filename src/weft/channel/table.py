"""The table in a message's control part that says which way each of its buffers comes.

Layout, little-endian, once ``token u64 | count u32``, then for every buffer in order::

    kind u8 | length u64 | address u64

The address is 0 but for ``CMA``. When no buffer is pulled the table is empty: the frame lists
the lengths of the buffers that follow it already, and most messages thus carry no table at all.
With the token the receiver says that it has pulled everything, and the sender lets go of it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import ProtocolError

_HEAD = struct.Struct("<QI")
_ENTRY = struct.Struct("<BQQ")


class ChannelKind(enum.IntEnum):
    """The way a buffer takes. The number travels."""

    INLINE = 0
    STREAM = 1
    CMA = 2


CMA = ChannelKind.CMA
_KINDS = tuple(ChannelKind)


class BufferEntry(NamedTuple):
    """One buffer: which way it comes, its size, and for ``CMA`` its address at the sender."""

    kind: ChannelKind
    size_bytes: int
    address: int = 0


class BufferTable(NamedTuple):
    """The buffers of one message; no entries if all of them simply follow."""

    token: int
    entries: tuple[BufferEntry, ...]


EMPTY_TABLE = BufferTable(0, ())


def encode_table(token: int, entries: Sequence[BufferEntry]) -> bytes:
    """Returns the table as bytes; empty if no buffer is pulled."""
    if not any(entry.kind == CMA for entry in entries):
        return b""
    return _HEAD.pack(token, len(entries)) + b"".join([_ENTRY.pack(*entry) for entry in entries])


def decode_table(
    data: bytes | bytearray | memoryview, following_bytes: Sequence[int], limit_bytes: int
) -> BufferTable:
    """Reads a table and checks it, before any memory is taken for what it announces.

    Args:
        data: What ``encode_table`` returned at the sender.
        following_bytes: Sizes of the buffers that followed the control part.
        limit_bytes: Largest sum of all buffers that is accepted.

    Raises:
        ProtocolError: The table is malformed, contradicts the buffers that came, or announces
            more than the limit.
    """
    if not data:
        return EMPTY_TABLE
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a buffer table of {len(data)} bytes is shorter than its own head")
    token, count = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + count * _ENTRY.size:
        raise ProtocolError(f"a buffer table of {len(data)} bytes announces {count} buffers")
    body = memoryview(data)[_HEAD.size :]
    entries = tuple([_entry(*fields) for fields in _ENTRY.iter_unpack(body)])
    _check_sizes(entries, following_bytes, limit_bytes)
    return BufferTable(token, entries)


def _entry(kind: int, size_bytes: int, address: int) -> BufferEntry:
    if kind >= len(_KINDS):
        raise ProtocolError(f"a buffer comes by channel {kind}, which this version does not have")
    if (kind == CMA) != (address != 0):
        raise ProtocolError(f"a buffer that comes by {_KINDS[kind].name} has address {address:#x}")
    if kind == CMA and not size_bytes:
        raise ProtocolError("an empty buffer is to be pulled")
    return BufferEntry(_KINDS[kind], size_bytes, address)


def _check_sizes(
    entries: Sequence[BufferEntry], following_bytes: Sequence[int], limit_bytes: int
) -> None:
    total = sum(entry.size_bytes for entry in entries)
    if total > limit_bytes:
        raise ProtocolError(f"a message announces {total} bytes; the limit is {limit_bytes}")
    expected = [entry.size_bytes for entry in entries if entry.kind != CMA]
    if expected != list(following_bytes):
        raise ProtocolError(
            f"a buffer table announces {len(expected)} buffers of {sum(expected)} bytes behind "
            f"the message; {len(following_bytes)} of {sum(following_bytes)} bytes came"
        )
    if len(expected) == len(entries):
        raise ProtocolError("a buffer table lists no buffer to pull; it should have been empty")
