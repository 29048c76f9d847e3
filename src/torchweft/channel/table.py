"""The table in a message's control part that lists the channel of each buffer.

Layout, little-endian, once ``token u64 | count u32``, then for every buffer in order::

    kind u8 | length u64 | place u64 | tag u64

The kind determines the meaning of place and tag; both are 0 for buffers that follow the message:

======== ============================= ========================================================
kind     place                         tag
======== ============================= ========================================================
cma      address at the sender         0
shm      offset in the sender's memory the loan's tag, written once the last user is gone
striped  chosen by the sender          chosen by the sender
cuda_ipc offset in the allocation      numbers u32 of the allocation and, in the lower half, of
                                       the event behind the work that makes the contents, or 0
rdma     number of a slab              0
======== ============================= ========================================================

Where some buffer goes by ``cuda_ipc``, handles follow that the receiver may not have yet::

    count u32, then for each handle: number u32 | size in bytes u64, 0 for an event | handle

Where some buffer goes by ``rdma``, descriptions of slabs follow that the receiver may not have
yet. A table has no buffers of both of these kinds::

    count u32, then for each slab: number u32 | size in bytes u64 | length u32 | description

When every buffer follows, the table is empty: the frame already lists their lengths. So most
messages carry no table. The token identifies the message: with it the receiver reports that it has
pulled the buffers, or that it could not.
"""

from __future__ import annotations

import enum
import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.errors import ProtocolError

_HEAD = struct.Struct("<QI")
_ENTRY = struct.Struct("<BQQQ")
_ONE = struct.Struct("<QIBQQQ")
"""A whole table of one buffer."""
_COUNT = struct.Struct("<I")
_KIND_OF = operator.itemgetter(0)
_HANDLE = struct.Struct("<IQ64s")
_DESCRIPTION = struct.Struct("<IQI")


class ChannelKind(enum.IntEnum):
    """The channel of a buffer. Its number goes over the wire."""

    INLINE = 0
    STREAM = 1
    CMA = 2
    SHM = 3
    STRIPED = 4
    CUDA_IPC = 5
    RDMA = 6


CMA = ChannelKind.CMA
SHM = ChannelKind.SHM
STRIPED = ChannelKind.STRIPED
CUDA_IPC = ChannelKind.CUDA_IPC
RDMA = ChannelKind.RDMA
FETCHED = frozenset({CMA, SHM, STRIPED, CUDA_IPC, RDMA})
"""Channels whose buffers do not follow the message; the receiver has to fetch them."""

_KINDS = tuple(ChannelKind)


class BufferEntry(NamedTuple):
    """One buffer: its channel, its size, and where to find it."""

    kind: ChannelKind
    size_bytes: int
    place: int = 0
    tag: int = 0


class SharedHandle(NamedTuple):
    """Makes an allocation or an event (of size 0) of a device, or a slab, of the sender accessible.

    Handles of devices have 64 bytes; descriptions of slabs have any length.
    """

    number: int
    size_bytes: int
    content: bytes


class BufferTable(NamedTuple):
    """The buffers of one message; no entries if all of them follow."""

    token: int
    entries: tuple[BufferEntry, ...]
    handles: tuple[SharedHandle, ...] = ()

    def of_kind(self, kind: ChannelKind) -> list[BufferEntry]:
        """Returns the buffers of one channel, in order."""
        return [entry for entry in self.entries if entry.kind == kind]


EMPTY_TABLE = BufferTable(0, ())


def encode_table(
    token: int, entries: Sequence[BufferEntry], handles: Sequence[SharedHandle] = ()
) -> bytes:
    """Returns the table as bytes; empty if every buffer follows.

    Args:
        token: Identifies the message.
        entries: The buffers, in order.
        handles: The handles, or descriptions of slabs, that the receiver may not have yet.
    """
    if len(entries) == 1 and entries[0].kind in FETCHED:
        table = _ONE.pack(token, 1, *entries[0])
        if entries[0].kind == SHM:
            return table
    elif not any(entry.kind in FETCHED for entry in entries):
        return b""
    else:
        table = b"".join((_HEAD.pack(token, len(entries)), *[_ENTRY.pack(*e) for e in entries]))
    kinds = set(map(_KIND_OF, entries))
    if CUDA_IPC in kinds:
        packed = [_HANDLE.pack(*each) for each in handles]
    elif RDMA in kinds:
        packed = [
            _DESCRIPTION.pack(number, size_bytes, len(content)) + content
            for number, size_bytes, content in handles
        ]
    else:
        return table
    return b"".join((table, _COUNT.pack(len(handles)), *packed))


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
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a buffer table of {len(data)} bytes is shorter than its own head")
    if len(data) == _ONE.size and not following_bytes:
        # The usual table, of one buffer in shared memory. All others are looked at more closely.
        token, count, kind, size_bytes, place, tag = _ONE.unpack(data)
        if count == 1 and kind == SHM and 0 < size_bytes <= limit_bytes:
            return BufferTable(token, (BufferEntry(SHM, size_bytes, place, tag),))
    token, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _ENTRY.size
    if len(data) < end:
        raise ProtocolError(f"a buffer table of {len(data)} bytes announces {count} buffers")
    # Copy to bytes: if an error's traceback keeps an iterator over a view, Python before 3.12.7
    # crashes when the garbage collector finds the two in a cycle (python/cpython#77894).
    body = bytes(memoryview(data)[_HEAD.size : end])
    entries = tuple([_entry(*fields) for fields in _ENTRY.iter_unpack(body)])
    _check_sizes(entries, following_bytes, limit_bytes)
    handles: tuple[SharedHandle, ...] = ()
    kinds = set(map(_KIND_OF, entries))
    if kinds.issuperset((CUDA_IPC, RDMA)):
        raise ProtocolError("a buffer table has both device memory and slabs")
    if CUDA_IPC in kinds:
        handles = _read_handles(bytes(memoryview(data)[end:]))
    elif RDMA in kinds:
        handles = _read_descriptions(bytes(memoryview(data)[end:]))
    elif len(data) != end:
        raise ProtocolError(f"a buffer table has {len(data) - end} bytes too many")
    return BufferTable(token, entries, handles)


def _read_handles(data: bytes) -> tuple[SharedHandle, ...]:
    if len(data) < _COUNT.size:
        raise ProtocolError("a buffer table with device memory lists no handles")
    count: int = _COUNT.unpack_from(data)[0]
    if len(data) != _COUNT.size + count * _HANDLE.size:
        raise ProtocolError(f"{len(data)} bytes of a buffer table announce {count} handles")
    return tuple([SharedHandle(*fields) for fields in _HANDLE.iter_unpack(data[_COUNT.size :])])


def _read_descriptions(data: bytes) -> tuple[SharedHandle, ...]:
    if len(data) < _COUNT.size:
        raise ProtocolError("a buffer table with slabs lists no descriptions")
    count: int = _COUNT.unpack_from(data)[0]
    found: list[SharedHandle] = []
    position = _COUNT.size
    while len(found) < count and position + _DESCRIPTION.size <= len(data):
        number, size_bytes, length = _DESCRIPTION.unpack_from(data, position)
        position += _DESCRIPTION.size + length
        found.append(SharedHandle(number, size_bytes, data[position - length : position]))
    if len(found) != count or position != len(data):
        raise ProtocolError(f"{len(data)} bytes of a buffer table announce {count} descriptions")
    return tuple(found)


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
    elif entry.kind == RDMA and tag:
        raise ProtocolError(f"a buffer in a slab has the tag {tag}; slabs have none")
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
