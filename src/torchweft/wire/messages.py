"""The closed set of messages, and the fixed heads of those that carry tensors.

Every message is one frame. ``CALL`` and the other messages with tensors are *tensor messages*: a
head of fixed layout, a pickled payload, and two tables that describe the tensors::

    head length u32 | payload length u32 | tensor table length u32 | channel table length u32
    head | payload | tensor table | channel table

A call or reply of a few small plain values is *compact* instead, which its flags say: the head's
numbers, for a call the function's name, and the values, with no tables and no pickle.

This layer neither pickles nor unpickles; a payload is opaque here.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId
from torchweft.wire.frames import Buffer


class Kind(enum.IntEnum):
    """The kind of a message; the number is sent."""

    HELLO = 1
    WELCOME = 2
    CALL = 3
    REPLY = 4
    CANCEL = 5
    REFERENCES = 6
    PULLED = 7
    SUPPLY = 8
    BACKWARD = 9
    GRADIENTS = 10
    RELEASE_CONTEXT = 11
    SHUTDOWN = 12
    VERDICT = 13
    CHALLENGE = 14
    ACKNOWLEDGED = 15
    GOODBYE = 16
    ARRIVED = 17
    UNSENT = 18
    DATA_BROKEN = 19
    FAILED = 20
    STACKS = 21
    RELEASE_MESSAGES = 22


VALUE_REPLY = 0
ERROR_REPLY = 1
"""Flags of a ``REPLY``: whether it carries a value or an error."""

COMPACT = 2
"""Flag of a ``CALL`` or ``REPLY`` without tables or pickle."""


_LENGTHS = struct.Struct("<IIII")
_CALL_HEAD = struct.Struct("<dqQQHI")
_REPLY_HEAD = struct.Struct("<QQI")
_REFERENCE = struct.Struct("<qqqq")
# These include the frame's header: one piece is packed faster than two.
_CALL, _REPLY = int(Kind.CALL), int(Kind.REPLY)
_COMPACT_CALL = struct.Struct("<BBHIQ dqQQH")
_COMPACT_CALL_HEAD = struct.Struct("<dqQQH")
_COMPACT_REPLY = struct.Struct("<BBHIQ QQ")
_COMPACT_REPLY_HEAD = struct.Struct("<QQ")
_LENGTH_LIMIT = 1 << 32
NO_CREATION = -1


class TensorMessageSections(NamedTuple):
    """The four sections of a tensor message's control part."""

    head: Buffer
    payload: Buffer
    tensor_table: Buffer
    channel_table: Buffer


def encode_tensor_message(
    head: bytes, payload: bytes, tensor_table: bytes, channel_table: bytes
) -> bytes:
    """Joins the sections of a tensor message's control part."""
    try:
        lengths = _LENGTHS.pack(len(head), len(payload), len(tensor_table), len(channel_table))
    except struct.error:
        raise ProtocolError(
            f"a message of {len(payload)} pickled bytes is beyond the limit of {_LENGTH_LIMIT}; "
            "send large data as tensors"
        ) from None
    return b"".join((lengths, head, payload, tensor_table, channel_table))


def decode_tensor_message(control: Buffer) -> TensorMessageSections:
    """Takes a tensor message's control part apart.

    Raises:
        ProtocolError: The lengths do not add up to the size of the control part.
    """
    if len(control) < _LENGTHS.size:
        raise ProtocolError(
            f"a tensor message of {len(control)} bytes is shorter than its own head"
        )
    head, payload, table, channels = _LENGTHS.unpack_from(control)
    head_end = _LENGTHS.size + head
    payload_end = head_end + payload
    table_end = payload_end + table
    if table_end + channels != len(control):
        raise ProtocolError("the sections of a tensor message do not add up to its length")
    return TensorMessageSections(
        control[_LENGTHS.size : head_end],
        control[head_end:payload_end],
        control[payload_end:table_end],
        control[table_end:],
    )


class HandedReference(NamedTuple):
    """A reference inside a message, and the token of this handover."""

    reference: ReferenceId
    token: int


class CallHead(NamedTuple):
    """The head of a ``CALL``.

    Attributes:
        remaining_s: Seconds the caller will still wait; infinity for no limit.
        creation: Number of the reference that this call creates, or ``NO_CREATION``.
        context_id: Autograd context of the caller, or 0.
        message_id: Recorded message of that context, or 0.
        function: Name of the function, or empty if it is inside the payload.
        references: References inside the arguments, in order.
    """

    remaining_s: float
    creation: int
    context_id: int
    message_id: int
    function: bytes
    references: tuple[HandedReference, ...]


class ReplyHead(NamedTuple):
    """The head of a ``REPLY``."""

    context_id: int
    message_id: int
    references: tuple[HandedReference, ...]


def encode_call_head(head: CallHead) -> bytes:
    """Returns ``head`` as bytes."""
    remaining_s, creation, context_id, message_id, function, references = head
    fixed = _CALL_HEAD.pack(
        remaining_s, creation, context_id, message_id, len(function), len(references)
    )
    if references:
        return fixed + function + _encode_references(references)
    return fixed + function


def decode_call_head(data: Buffer) -> CallHead:
    """Reads the head of a ``CALL``; raises ProtocolError if it is malformed."""
    if len(data) < _CALL_HEAD.size:
        raise ProtocolError(f"the head of a call has {len(data)} bytes, too few")
    remaining_s, creation, context_id, message_id, size, count = _CALL_HEAD.unpack_from(data)
    end = _CALL_HEAD.size + size
    function = bytes(data[_CALL_HEAD.size : end])
    references = _decode_references(data, end, count)
    return CallHead(remaining_s, creation, context_id, message_id, function, references)


def encode_reply_head(head: ReplyHead) -> bytes:
    """Returns ``head`` as bytes."""
    fixed = _REPLY_HEAD.pack(head.context_id, head.message_id, len(head.references))
    return fixed + _encode_references(head.references) if head.references else fixed


def decode_reply_head(data: Buffer) -> ReplyHead:
    """Reads the head of a ``REPLY``; raises ProtocolError if it is malformed."""
    if len(data) < _REPLY_HEAD.size:
        raise ProtocolError(f"the head of a reply has {len(data)} bytes, too few")
    context_id, message_id, count = _REPLY_HEAD.unpack_from(data)
    references = _decode_references(data, _REPLY_HEAD.size, count)
    return ReplyHead(context_id, message_id, references)


def encode_compact_call(
    number: int,
    remaining_s: float,
    creation: int,
    context_id: int,
    message_id: int,
    function: bytes,
    values: bytes,
) -> bytes:
    """Returns the whole frame of a compact ``CALL``; see ``CallHead`` for the arguments."""
    size = len(function)
    control_bytes = _COMPACT_CALL_HEAD.size + size + len(values)
    head = _COMPACT_CALL.pack(
        _CALL,
        COMPACT,
        0,
        control_bytes,
        number,
        remaining_s,
        creation,
        context_id,
        message_id,
        size,
    )
    return b"".join((head, function, values))


def decode_compact_call(control: Buffer) -> tuple[float, int, int, int, bytes, int]:
    """Reads the head of a compact ``CALL``.

    Returns:
        Seconds the caller will wait, number of the reference to create, context, message, name of
        the function, and the offset of the values.

    Raises:
        ProtocolError: It is cut short.
    """
    end = len(control)
    if end < _COMPACT_CALL_HEAD.size:
        raise ProtocolError(f"a compact call of {end} bytes is shorter than its own head")
    remaining_s, creation, context_id, message_id, size = _COMPACT_CALL_HEAD.unpack_from(control)
    start = _COMPACT_CALL_HEAD.size + size
    if start > end:
        raise ProtocolError("the name of the function in a compact call is cut short")
    name = bytes(control[_COMPACT_CALL_HEAD.size : start])
    return remaining_s, creation, context_id, message_id, name, start


def encode_compact_reply(number: int, context_id: int, message_id: int, values: bytes) -> bytes:
    """Returns the whole frame of a compact ``REPLY``."""
    control_bytes = _COMPACT_REPLY_HEAD.size + len(values)
    head = _COMPACT_REPLY.pack(_REPLY, COMPACT, 0, control_bytes, number, context_id, message_id)
    return head + values


def decode_compact_reply(control: Buffer) -> tuple[int, int, int]:
    """Reads the head of a compact ``REPLY``; returns context, message and values' offset."""
    if len(control) < _COMPACT_REPLY_HEAD.size:
        raise ProtocolError(f"a compact reply of {len(control)} bytes is shorter than its own head")
    context_id, message_id = _COMPACT_REPLY_HEAD.unpack_from(control)
    return context_id, message_id, _COMPACT_REPLY_HEAD.size


def _encode_references(references: tuple[HandedReference, ...]) -> bytes:
    return b"".join([_REFERENCE.pack(*handed.reference, handed.token) for handed in references])


def _decode_references(data: Buffer, start: int, count: int) -> tuple[HandedReference, ...]:
    if len(data) - start != count * _REFERENCE.size:
        raise ProtocolError("the references of a message do not add up to its length")
    if not count:
        return ()
    return tuple(
        HandedReference(ReferenceId(*entry[:3]), entry[3])
        for entry in _REFERENCE.iter_unpack(bytes(data[start:]))
    )


def encode_ints(*values: int) -> bytes:
    """Returns signed 64-bit integers as bytes, for small control messages."""
    return struct.pack(f"<{len(values)}q", *values)


def decode_ints(data: Buffer, least: int = 0) -> tuple[int, ...]:
    """Reads the output of ``encode_ints``.

    Args:
        data: The bytes.
        least: The minimum number of integers.

    Raises:
        ProtocolError: The length is not a multiple of 8, or there are too few integers.
    """
    if len(data) % 8 or len(data) < 8 * least:
        raise ProtocolError(f"{len(data)} bytes are no list of {least} or more 64-bit integers")
    return struct.unpack(f"<{len(data) // 8}q", data)
