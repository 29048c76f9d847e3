"""The table in a message's control part that says which way each of its buffers comes.

Layout, little-endian, once ``token u64 | count u32``, then for every buffer in order::

    kind u8 | length u64 | place u64 | tag u64

What place and tag mean is up to the kind; both are 0 for buffers that follow the message:

======= ============================= =========================================================
kind    place                         tag
======= ============================= =========================================================
cma     address at the sender         0
shm     offset in the sender's memory what to write where once the last user is gone
striped for the sender to choose      for the sender to choose
======= ============================= =========================================================

When every buffer follows, the table is empty: the frame lists their lengths already, and most
messages thus carry no table at all. The token names the message wherever its buffers are spoken
of: the receiver says with it that it has pulled them, or that it could not.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.errors import ProtocolError

_HEAD = struct.Struct("<QI")
_ENTRY = struct.Struct("<BQQQ")


class ChannelKind(enum.IntEnum):
    """The way a buffer takes. The number travels."""

    INLINE = 0
    STREAM = 1
    CMA = 2
    SHM = 3
    STRIPED = 4


CMA = ChannelKind.CMA
SHM = ChannelKind.SHM
STRIPED = ChannelKind.STRIPED
FETCHED = frozenset({CMA, SHM, STRIPED})
"""The ways of buffers that do not follow the message; the receiver has to fetch them."""

_KINDS = tuple(ChannelKind)


class BufferEntry(NamedTuple):
    """One buffer: which way it comes, its size, and where to find it."""

    kind: ChannelKind
    size_bytes: int
    place: int = 0
    tag: int = 0


class BufferTable(NamedTuple):
    """The buffers of one message; no entries if all of them simply follow."""

    token: int
    entries: tuple[BufferEntry, ...]

    def of_kind(self, kind: ChannelKind) -> list[BufferEntry]:
        """Returns the buffers that come one way, in order."""
        return [entry for entry in self.entries if entry.kind == kind]


EMPTY_TABLE = BufferTable(0, ())


def encode_table(token: int, entries: Sequence[BufferEntry]) -> bytes:
    """Returns the table as bytes; empty if every buffer follows."""
    if not any(entry.kind in FETCHED for entry in entries):
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
    # Bytes: an iterator over a view that an error keeps, in its traceback, crashes Python before
    # 3.12.7 when the garbage collector finds the two in a cycle (python/cpython#77894).
    body = bytes(memoryview(data)[_HEAD.size :])
    entries = tuple([_entry(*fields) for fields in _ENTRY.iter_unpack(body)])
    _check_sizes(entries, following_bytes, limit_bytes)
    return BufferTable(token, entries)


def _entry(kind: int, size_bytes: int, place: int, tag: int) -> BufferEntry:
    if kind >= len(_KINDS):
        raise ProtocolError(f"a buffer comes by channel {kind}, which this version does not have")
    entry = BufferEntry(_KINDS[kind], size_bytes, place, tag)
    if entry.kind not in FETCHED:
        if place or tag:
            raise ProtocolError(f"a buffer that follows as {entry.kind.name} is at {place:#x}")
    elif not size_bytes:
        raise ProtocolError(f"an empty buffer is to be fetched by {entry.kind.name}")
    elif entry.kind == CMA and not place:
        raise ProtocolError("a buffer that comes by CMA has no address")
    return entry


def _check_sizes(
    entries: Sequence[BufferEntry], following_bytes: Sequence[int], limit_bytes: int
) -> None:
    total = sum(entry.size_bytes for entry in entries)
    if total > limit_bytes:
        raise ProtocolError(f"a message announces {total} bytes; the limit is {limit_bytes}")
    expected = [entry.size_bytes for entry in entries if entry.kind not in FETCHED]
    if expected != list(following_bytes):
        raise ProtocolError(
            f"a buffer table announces {len(expected)} buffers of {sum(expected)} bytes behind "
            f"the message; {len(following_bytes)} of {sum(following_bytes)} bytes came"
        )
    if len(expected) == len(entries):
        raise ProtocolError("a buffer table lists no buffer to fetch; it should have been empty")
