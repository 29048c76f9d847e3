"""The closed set of messages, and the layout of those that carry values.

Every message is one frame. ``CALL``, ``POST``, ``REPLY`` and ``GRADIENTS`` carry a value: a head of
fixed layout, parts whose sizes are in the head, and the tensors that were taken out of the value::

    CALL   remaining s f64 | creation i64 | context u64 | message u64 | name size u32
           span size u32 | references u32 | payload size u32
           name | span | references | payload | tensors
    REPLY  context u64 | message u64 | references u32 | payload size u32
           references | payload | tensors

The span of a ``CALL`` is the context of a span of OpenTelemetry, usually empty. Without a name, the
function stands before its arguments.

A ``POST`` has values for a port of the receiver, and no answer. It is laid out like a ``CALL``; a
head that its sender chooses stands in place of the name. The number of the frame is that of the
port.

The tensors are small ones with their memory, one after the other. With the flag ``TABLES`` they are
descriptions, a table of the buffers with their memory, and the sizes of both::

    descriptions | channel table | size of the descriptions u32 | channel table size u32

``SHUTDOWN`` is a step of leaving the group, with its arguments. The last step of a closed group
names the lost workers; the texts say why each is lost, as a list in JSON::

    SHUTDOWN        step i64 | arguments i64 | each argument i64 | texts, if any

``PASS_SPAN`` is the context of the span of a backward pass, whose number is that of the frame,
behind the number of the autograd context. It
stands before the first message of the pass from one worker to another.

This layer reads neither payloads nor tensors.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchweft.engine.wire.frames import HEADER_BYTES, Buffer, encode_frame
from torchweft.errors import ProtocolError, SerializationError
from torchweft.ids import ID_LIMIT, ReferenceId


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
    UNSENT = 18
    DATA_BROKEN = 19
    FAILED = 20
    STACKS = 21
    RELEASE_MESSAGES = 22
    POST = 23
    REPORT = 26
    DUMP = 27
    REMOTE_MEMORY = 29
    PASS_SPAN = 31
    VOUCHER = 32


ERROR_REPLY = 1
"""Flag of a ``REPLY``: the payload is an error."""
TABLES = 2
"""Flag of a message whose tensors are described by tables."""
NAMED = 4
"""Flag of a ``CALL`` whose value is the positional arguments, the keyword arguments, and the tuple
of their names."""


_CALL_HEAD = struct.Struct("<dqQQIIII")
_GRAPH = struct.Struct("<QQ")
_GRAPH_BEGIN = 16
_REPLY_HEAD = struct.Struct("<QQII")
_TABLE_SIZES = struct.Struct("<II")
_REFERENCE = struct.Struct("<qqqq")
_STEP_BYTES = 16
NUMBER = struct.Struct("<Q")
"""A number of a message."""
_CALL_BYTES, _REPLY_BYTES, _REFERENCE_BYTES = _CALL_HEAD.size, _REPLY_HEAD.size, _REFERENCE.size
PAYLOAD_LIMIT_BYTES = 31 << 26
"""A receiver would take a longer message for a forged one (``knobs.CONTROL_LIMIT_BYTES``). A
thirty-second of its limit is left for heads and tables."""
NO_CREATION = -1
NO_GRAD = (1 << 64) - 1
"""In place of a context's number: the caller wants no graph of arguments and result."""
NO_CONTEXTS = (0, NO_GRAD)
"""In place of a context's number where there is none."""
_NUMBER_LIMIT = 1 << 63
"""All other numbers are less: they stand in signed fields of other messages."""
MAX_SPAN_BYTES = 8192
"""Largest context of a span that is carried."""


class HandedReference(NamedTuple):
    """A reference inside a message, and the token of this handover."""

    reference: ReferenceId
    token: int


# Tuples without names: each call and reply makes one, and reads all of it.

ValueHead = tuple[int, int, Sequence[HandedReference], int, int]
"""The head of a value: autograd context of the sender, or 0; recorded message of that context, or
0; references inside the value, in order; offsets of the payload and of the tensors."""

CallHead = tuple[float, int, bytes, bytes, ValueHead]
"""The head of a ``CALL``: seconds the caller will still wait, infinity for no limit; number of the
reference that this call creates, or ``NO_CREATION``; name of the function, or empty if it goes by
value; context of the caller's span, or empty; head of the arguments."""


def encode_call(
    remaining_s: float,
    creation: int,
    context_id: int,
    message_id: int,
    name: bytes,
    span: bytes,
    references: Sequence[HandedReference],
    payload: bytes,
    tensors: bytes | bytearray = b"",
) -> bytes:
    """Returns the control part of a ``CALL`` or a ``POST``; ``CallHead`` explains it.

    Without ``tensors``, small ones or tables can follow it.

    Raises:
        SerializationError: The payload is too large.
    """
    if len(payload) > PAYLOAD_LIMIT_BYTES:
        raise _too_large(len(payload))
    sizes = len(name), len(span), len(references), len(payload)
    head = _CALL_HEAD.pack(remaining_s, creation, context_id, message_id, *sizes)
    handed = _encode_references(references) if references else b""
    return b"".join((head, name, span, handed, payload, tensors))


def place_in_graph(frame: bytearray, context_id: int, message_id: int) -> None:
    """Puts the numbers of its graph into the frame of a ``CALL`` or a ``POST``."""
    _GRAPH.pack_into(frame, HEADER_BYTES + _GRAPH_BEGIN, context_id, message_id)


def pass_span(pass_id: int, context_id: int, context: bytes) -> list[Buffer]:
    """Returns the pieces of a ``PASS_SPAN``.

    Args:
        pass_id: The pass.
        context_id: The autograd context of the pass.
        context: The context of its span, at most ``MAX_SPAN_BYTES``.
    """
    return encode_frame(Kind.PASS_SPAN, 0, pass_id, NUMBER.pack(context_id) + context)


def decode_pass_span(control: Buffer) -> tuple[int, bytes]:
    """Returns the autograd context in a ``PASS_SPAN``, and the context of the span.

    Raises:
        ProtocolError: It is too long, or too short.
    """
    size = len(control) - NUMBER.size
    if not 0 <= size <= MAX_SPAN_BYTES:
        raise ProtocolError(
            f"the context of a pass has {size} bytes; at most {MAX_SPAN_BYTES} are carried"
        )
    return NUMBER.unpack_from(control)[0], bytes(control[NUMBER.size :])


def encode_reply(
    context_id: int,
    message_id: int,
    references: Sequence[HandedReference],
    payload: bytes,
    tensors: bytes | bytearray = b"",
) -> bytes:
    """Returns the control part of a ``REPLY``; see ``encode_call``."""
    size = len(payload)
    if size > PAYLOAD_LIMIT_BYTES:
        raise _too_large(size)
    head = _REPLY_HEAD.pack(context_id, message_id, len(references), size)
    handed = _encode_references(references) if references else b""
    return b"".join((head, handed, payload, tensors))


def _too_large(size: int) -> SerializationError:
    return SerializationError(
        f"a message has {size} bytes beside its tensors, and at most {PAYLOAD_LIMIT_BYTES} fit; "
        "send them as tensors or NumPy arrays, or in several messages"
    )


def decode_call(control: Buffer) -> CallHead:
    """Reads the head of a ``CALL``; raises ProtocolError if it is malformed."""
    end = len(control)
    if end < _CALL_BYTES:
        raise ProtocolError(f"a call of {end} bytes is shorter than its own head")
    remaining_s, creation, context_id, message_id, name, span, count, payload = (
        _CALL_HEAD.unpack_from(control)
    )
    span_start = _CALL_BYTES + name
    references_start = span_start + span
    start = references_start + count * _REFERENCE_BYTES
    payload_end = start + payload
    if payload_end > end:
        raise ProtocolError("the parts of a call are cut short")
    if creation < NO_CREATION or remaining_s != remaining_s:
        raise ProtocolError(f"a call makes value {creation}, and may take {remaining_s} s")
    if context_id and context_id >= _NUMBER_LIMIT and context_id != NO_GRAD:
        raise ProtocolError(f"a call names context {context_id}")
    if message_id and message_id >= _NUMBER_LIMIT:
        raise ProtocolError(f"a call has the message number {message_id}")
    handed = _decode_references(control, references_start, start) if count else ()
    value = context_id, message_id, handed, start, payload_end
    function = bytes(control[_CALL_BYTES:span_start])
    carried = bytes(control[span_start:references_start])
    return remaining_s, creation, function, carried, value


CALL_HEAD_BYTES, REPLY_HEAD_BYTES = _CALL_BYTES, _REPLY_BYTES
"""Bytes at the begin of a ``CALL`` and a ``REPLY`` that have numbers only, no name and no value."""


def with_names(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns positional and keyword arguments as one tuple, which ends with the names."""
    return (*args, *kwargs.values(), tuple(kwargs))


def split_names(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments in what ``with_names`` returned."""
    names = values[-1] if values else None
    if type(names) is not tuple:
        raise ProtocolError("a call has no names of its keyword arguments")
    start = len(values) - 1 - len(names)
    kwargs = dict(zip(names, values[start:-1], strict=False))
    if start < 0 or len(kwargs) < len(names):
        raise ProtocolError(f"a call has too few keyword arguments, or some twice: {names}")
    return values[:start], kwargs


class Sizes(NamedTuple):
    """The numbers in the head of a message with a value; see ``ValueHead`` and ``CallHead``."""

    creation: int
    context_id: int
    message_id: int
    before_tensors: int
    """Bytes of the control part before the tensors."""


def sizes_of_call(head: Buffer) -> Sizes:
    """Reads the first ``CALL_HEAD_BYTES`` of a ``CALL``."""
    _, creation, context_id, message_id, *extras, count, payload = _CALL_HEAD.unpack_from(head)
    before = _CALL_BYTES + sum(extras) + count * _REFERENCE_BYTES + payload
    return Sizes(creation, context_id, message_id, before)


def sizes_of_reply(head: Buffer) -> Sizes:
    """Reads the first ``REPLY_HEAD_BYTES`` of a ``REPLY``."""
    context_id, message_id, count, payload = _REPLY_HEAD.unpack_from(head)
    before = _REPLY_BYTES + count * _REFERENCE_BYTES + payload
    return Sizes(NO_CREATION, context_id, message_id, before)


def decode_reply(control: Buffer) -> ValueHead:
    """Reads the head of a ``REPLY``; raises ProtocolError if it is malformed."""
    end = len(control)
    if end < _REPLY_BYTES:
        raise ProtocolError(f"a reply of {end} bytes is shorter than its own head")
    context_id, message_id, count, payload = _REPLY_HEAD.unpack_from(control)
    start = _REPLY_BYTES
    handed: Sequence[HandedReference] = ()
    if count:
        start += count * _REFERENCE_BYTES
        if start <= end:
            handed = _decode_references(control, _REPLY_BYTES, start)
    payload_end = start + payload
    if payload_end > end:
        raise ProtocolError("the references or the payload of a reply are cut short")
    if context_id and context_id >= _NUMBER_LIMIT and context_id != NO_GRAD:
        raise ProtocolError(f"a reply names context {context_id}")
    if message_id and message_id >= _NUMBER_LIMIT:
        raise ProtocolError(f"a reply has the message number {message_id}")
    return context_id, message_id, handed, start, payload_end


def encode_tables(tensor_table: bytes, channel_table: bytes) -> bytes:
    """Returns the end of a message with ``TABLES``."""
    sizes = _TABLE_SIZES.pack(len(tensor_table), len(channel_table))
    return b"".join((tensor_table, channel_table, sizes))


def decode_tables(control: Buffer) -> tuple[Buffer, Buffer]:
    """Returns the descriptions and the channel table at the end of a message with ``TABLES``.

    Raises:
        ProtocolError: The message is shorter than its tables.
    """
    end = len(control) - _TABLE_SIZES.size
    if end < 0:
        raise ProtocolError(f"a message of {len(control)} bytes is too short for tables")
    tensors, channels = _TABLE_SIZES.unpack_from(control, end)
    start = end - tensors - channels
    if start < 0:
        raise ProtocolError("the tables of a message are longer than the message")
    return control[start : end - channels], control[end - channels : end]


def _encode_references(references: Sequence[HandedReference]) -> bytes:
    return b"".join([_REFERENCE.pack(*handed.reference, handed.token) for handed in references])


def _decode_references(data: Buffer, start: int, end: int) -> tuple[HandedReference, ...]:
    handed = []
    for creator, owner, number, token in _REFERENCE.iter_unpack(data[start:end]):
        if min(creator, owner, number, token) < 0 or max(creator, owner) >= ID_LIMIT:
            raise ProtocolError(
                f"a message hands on value {number} by worker {creator} at worker {owner}, with "
                f"token {token}"
            )
        handed.append(HandedReference(ReferenceId(creator, owner, number), token))
    return tuple(handed)


def encode_ints(*values: int) -> bytes:
    """Returns signed 64-bit integers as bytes, for small control messages."""
    return struct.pack(f"<{len(values)}q", *values)


def decode_ints(data: Buffer, least: int = 0) -> tuple[int, ...]:
    """Reads the output of ``encode_ints``, whose integers must not be negative.

    Args:
        data: The bytes.
        least: The minimum number of integers.

    Raises:
        ProtocolError: The length is not a multiple of 8, there are too few integers, or one is
            negative.
    """
    if len(data) % 8 or len(data) < 8 * least:
        raise ProtocolError(f"{len(data)} bytes are no list of {least} or more 64-bit integers")
    values = struct.unpack(f"<{len(data) // 8}q", data)
    if values and min(values) < 0:
        raise ProtocolError(f"a list of integers holds the negative number {min(values)}")
    return values


def encode_texts(texts: Sequence[str]) -> bytes:
    """Returns the texts at the end of a ``SHUTDOWN``."""
    return json.dumps(texts).encode() if texts else b""


def decode_step(control: Buffer) -> tuple[int, list[int], list[str]]:
    """Returns the step, the arguments and the texts in a ``SHUTDOWN``.

    Raises:
        ProtocolError: It is malformed.
    """
    step, count = decode_ints(control[:_STEP_BYTES], least=2)
    end = _STEP_BYTES + 8 * count
    if not _STEP_BYTES <= end <= len(control):
        raise ProtocolError(f"a shutdown message of {len(control)} bytes has {count} arguments")
    return step, list(decode_ints(control[_STEP_BYTES:end])), _decode_texts(bytes(control[end:]))


def _decode_texts(data: bytes) -> list[str]:
    try:
        texts = json.loads(data) if data else []
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the texts of a shutdown message are no JSON: {error}") from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ProtocolError("the texts of a shutdown message are no list of texts")
    return texts
