"""The table in a message's control part that lists the channel of each buffer.

Layout, little-endian, once ``token u64 | count u32``, then for every buffer in order::

    channel u8 | size u64 | length of the handle u16 | handle

Channel 0 stands for buffers that follow the message; they have no handle. Only the channel knows
the meaning of a handle. When every buffer follows, the table is empty: the frame already lists
their lengths. The token identifies the message: with it the receiver reports that it has the
buffers, or asks for some of them again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchweft.channel.channel import Entry
from torchweft.errors import ProtocolError

FOLLOWS = 0
"""Stands in place of a channel for buffers that follow the message."""

_HEAD = struct.Struct("<QI")
_ENTRY = struct.Struct("<BQH")
_HEAD_BYTES, _ENTRY_BYTES = _HEAD.size, _ENTRY.size


class BufferTable(NamedTuple):
    """The buffers of one message; no entries if all of them follow."""

    token: int
    entries: Sequence[Entry]


EMPTY_TABLE = BufferTable(0, ())


def encode_table(
    token: int, entries: Sequence[tuple[int, int, bytes, torch.device | None]]
) -> bytes:
    """Returns the table as bytes; empty if every buffer follows.

    Args:
        token: Identifies the message.
        entries: The buffers, in order, with the fields of ``Entry``.
    """
    parts, is_needed = [_HEAD.pack(token, len(entries))], False
    for channel, size_bytes, content, _ in entries:
        parts += (_ENTRY.pack(channel, size_bytes, len(content)), content)
        if channel != FOLLOWS:
            is_needed = True
    return b"".join(parts) if is_needed else b""


def decode_table(
    data: bytes | bytearray | memoryview, following_bytes: Sequence[int], limit_bytes: int
) -> BufferTable:
    """Reads a table and checks it before memory is allocated for its buffers.

    Args:
        data: The table, as ``encode_table`` returned it at the sender.
        following_bytes: Sizes of the buffers that followed the control part.
        limit_bytes: Largest sum of all buffers that is accepted.

    Raises:
        ProtocolError: The table is malformed, contradicts the buffers that arrived, or announces
            more than the limit.
    """
    if not data:
        return EMPTY_TABLE
    data, size = bytes(data), len(data)
    if size < _HEAD_BYTES:
        raise ProtocolError(f"a buffer table of {size} bytes is shorter than its own head")
    token, count = _HEAD.unpack_from(data)
    if size < _HEAD_BYTES + count * _ENTRY_BYTES:
        raise ProtocolError(f"a buffer table of {size} bytes announces {count} buffers")
    entries, end = [], _HEAD_BYTES
    total_bytes, following = 0, []
    for _ in range(count):
        start = end + _ENTRY_BYTES
        if start > size:
            raise ProtocolError(f"{size} bytes of a buffer table end before its entries")
        channel, size_bytes, length = _ENTRY.unpack_from(data, end)
        end = start + length
        entries.append(Entry(channel, size_bytes, data[start:end]))
        total_bytes += size_bytes
        if channel == FOLLOWS:
            following.append(size_bytes)
            if length:
                raise ProtocolError("a buffer that follows its message has a handle")
        elif not size_bytes:
            raise ProtocolError("an empty buffer is to be fetched over a channel")
    if end != size:
        raise ProtocolError(f"a buffer table has {size} bytes, and its entries take {end}")
    if total_bytes > limit_bytes:
        raise ProtocolError(f"a message announces {total_bytes} bytes; the limit is {limit_bytes}")
    if following != list(following_bytes):
        raise ProtocolError(
            f"a buffer table announces {len(following)} buffers behind the message; "
            f"{len(following_bytes)} of {sum(following_bytes)} bytes came"
        )
    if len(following) == count:
        raise ProtocolError("a buffer table lists no buffer to fetch; it should have been empty")
    return BufferTable(token, entries)
