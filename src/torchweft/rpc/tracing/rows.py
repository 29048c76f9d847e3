"""Packs the records of calls and messages, of which there are many, as bytes.

Each object that the garbage collector tracks and that is kept brings its next collection nearer;
collections would take longer than all else that a trace does. It does not track bytes. A time that
is known only later is packed into its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

from torchweft.protocol.observing.trace import MADE, RECEIVED, SENT, SERVED, Row
from torchweft.rpc.tracing.heads import LENGTHS, context_of, ids_in
from torchweft.wire.frames import HEADER, HEADER_BYTES, Buffer
from torchweft.wire.messages import Kind

_TIME = Struct("<d")
_MADE = Struct("<BQddQqQIqQ??")
_SERVED = Struct("<BQddddQQqQqIQ?")
_SENT = Struct("<BQddQqI")
_RECEIVED = Struct("<BQdQqIBBQ")

PACK_SENT: Sequence[Callable[..., bytes] | None] = [
    Struct(f"{_SENT.format}{HEADER_BYTES + LENGTHS[kind]}s").pack
    if kind in (Kind.CALL, Kind.REPLY)
    else None
    for kind in range(256)
]
"""Packs a message of one of the usual kinds, by its kind. The last argument is the whole message:
only its head is taken. For other messages there is ``pack_sent``."""
pack_made, pack_served = _MADE.pack, _SERVED.pack
pack_sent, pack_received = _SENT.pack, _RECEIVED.pack
set_time = _TIME.pack_into
"""Called with a row, a place and a time."""
SENT_ENDED = 1 + 8 + 8
"""The place of the time at which a message had been written."""
SERVED_ANSWERED = 1 + 8 + 3 * 8
"""The place of the time at which a call had been answered."""


def unpacked(row: Buffer | Row, names: Sequence[str]) -> Row:
    """Returns a row as it travels: its number, its tag, and the fields of its record.

    Args:
        row: A row as it was noted.
        names: The names of functions, by their numbers in rows.
    """
    if isinstance(row, tuple):
        return row
    return _UNPACK[row[0]](row, names)


def _made(row: Buffer, names: Sequence[str]) -> Row:
    tag, number, started_s, ended_s, thread, callee, call, name, *rest = _MADE.unpack(row)
    return (number, tag, started_s, ended_s, thread, callee, call, names[name], *rest)


def _served(row: Buffer, names: Sequence[str]) -> Row:
    tag, number, *fields, name, context_id, failed = _SERVED.unpack(row)
    return (number, tag, *fields, names[name], context_of(context_id), failed)


def _sent(row: Buffer, _: Sequence[str]) -> Row:
    tag, number, *front, size_bytes = _SENT.unpack_from(row)
    head = bytes(row[_SENT.size :])
    kind, flags, count, control_bytes, identity = HEADER.unpack_from(head)
    ids = ids_in(kind, flags, head[HEADER_BYTES:], control_bytes)
    stream_bytes = size_bytes - HEADER_BYTES - 8 * count - control_bytes
    told = (ids.context_id, ids.message_id, ids.creation, ids.inline_bytes, stream_bytes)
    return (number, tag, *front, kind, identity, size_bytes, *told)


def _received(row: Buffer, _: Sequence[str]) -> Row:
    tag, number, *front, size_bytes, kind, flags, identity = _RECEIVED.unpack_from(row)
    ids = ids_in(kind, flags, bytes(row[_RECEIVED.size :]), size_bytes - HEADER_BYTES)
    told = (ids.context_id, ids.message_id, ids.creation)
    return (number, tag, *front, kind, identity, size_bytes, *told)


_UNPACK = {MADE: _made, SERVED: _served, SENT: _sent, RECEIVED: _received}
