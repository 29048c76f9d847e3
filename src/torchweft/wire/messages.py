"""The closed set of messages, and the layout of those that carry values.

Every message is one frame. ``CALL``, ``REPLY`` and ``GRADIENTS`` carry a value: a head of fixed
layout, the payload, and the tensors that were taken out of it::

    CALL   remaining s f64 | creation i64 | context u64 | message u64 | name size u16
           references u32 | payload size u32 | name | references | payload | tensors
    REPLY  context u64 | message u64 | references u32 | payload size u32
           references | payload | tensors

A ``POST`` has a head, which its sender chooses, and values for a port of the receiver. It is laid
out like a ``CALL`` without a name, and the first value is the head. With the flag ``PLAIN`` the
values are small tensors alone::

    POST   head size u8 | head | tensors

The tensors are small ones with their memory, one after the other. With the flag ``TABLES`` they are
two tables, and their sizes, instead; their memory is elsewhere::

    tensor table | channel table | tensor table size u32 | channel table size u32

``CALL_WITH_CODE`` is a call that names code which the callee keeps; ``CODE`` brings such code, and
names code that the callee forgets::

    CALL_WITH_CODE  codes u16 | number u64 of each | a CALL
    CODE            number u64 | forgotten u32 | number u64 of each | content

``CALL_IN_SPAN`` is a call with the context of a span of OpenTelemetry::

    CALL_IN_SPAN    kind u8 | context size u16 | context | a CALL or CALL_WITH_CODE

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
from typing import NamedTuple

from torchweft.errors import ProtocolError, SerializationError
from torchweft.ids import ID_LIMIT, ReferenceId
from torchweft.wire.frames import HEADER, HEADER_BYTES, Buffer, encode_frame


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
    CODE = 24
    CALL_WITH_CODE = 25
    REPORT = 26
    DUMP = 27
    DEVICE_FREED = 28
    REMOTE_MEMORY = 29
    CALL_IN_SPAN = 30
    PASS_SPAN = 31
    VOUCHER = 32


ERROR_REPLY = 1
"""Flag of a ``REPLY``: the payload is an error."""
TABLES = 2
"""Flag of a message whose tensors are described by tables."""
POSITIONAL = 4
"""Flag of a ``CALL`` whose value is the positional arguments alone."""
CAPTURED = 8
"""Flag of a ``CALL_WITH_CODE`` whose function is made of the first code; the values that the
function captures stand before the positional arguments."""
NAMED = 32
"""Flag of a ``CALL`` whose value is the positional arguments, the keyword arguments, and as a text
the names of the latter, separated by commas."""
PLAIN = 16
"""Flag of a ``POST`` that has nothing but a head and tensors."""


_CALL_HEAD = struct.Struct("<dqQQHII")
_REPLY_HEAD = struct.Struct("<QQII")
_TABLE_SIZES = struct.Struct("<II")
_REFERENCE = struct.Struct("<qqqq")
_STEP_BYTES = 16
# These include the frame's header: one piece is packed faster than two.
_CALL, _REPLY, _POST = int(Kind.CALL), int(Kind.REPLY), int(Kind.POST)
_CALL_FRAME = struct.Struct("<BBHIQ dqQQHII")
_REPLY_FRAME = struct.Struct("<BBHIQ QQII")
_POST_FRAME = struct.Struct("<BBHIQ B")
NUMBER = struct.Struct("<Q")
"""The number of a frame, which stands at ``NUMBER_OFFSET``."""
NUMBER_OFFSET = 8
_CALL_WITH_CODE = int(Kind.CALL_WITH_CODE)
_CODES = struct.Struct("<H")
_ONE_CODE = struct.Struct("<HQ")
_CODE_HEAD = struct.Struct("<QI")
_CALL_IN_SPAN = int(Kind.CALL_IN_SPAN)
_SPAN_HEAD = struct.Struct("<BH")
_CALL_BYTES, _REPLY_BYTES, _REFERENCE_BYTES = _CALL_HEAD.size, _REPLY_HEAD.size, _REFERENCE.size
PAYLOAD_LIMIT_BYTES = 31 << 26
"""A receiver would take a longer message for a forged one (``knobs.CONTROL_LIMIT_BYTES``). A
thirty-second of its limit is left for heads and tables."""
NO_CREATION = -1
NO_GRAD = (1 << 64) - 1
"""In place of a context's number: the caller wants no graph of arguments and result."""
_NUMBER_LIMIT = 1 << 63
"""All other numbers are less: they stand in signed fields of other messages."""
MAX_CODES = 0xFFFF
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

CallHead = tuple[float, int, bytes, ValueHead]
"""The head of a ``CALL``: seconds the caller will still wait, infinity for no limit; number of the
reference that this call creates, or ``NO_CREATION``; name of the function, or empty if it is inside
the payload; head of the arguments."""


def encode_call(
    flags: int,
    remaining_s: float,
    creation: int,
    context_id: int,
    message_id: int,
    function: bytes,
    references: Sequence[HandedReference],
    payload: bytes,
    tensors: bytes = b"",
) -> bytearray:
    """Returns the whole frame of a ``CALL`` whose tensors stand in it; ``CallHead`` explains it.

    The number of the call is 0; ``NUMBER`` at ``NUMBER_OFFSET`` sets it.

    Raises:
        SerializationError: The payload is too large.
    """
    handed, count = b"", 0
    if references:
        handed, count = _encode_references(references), len(references)
    name, size = len(function), len(payload)
    if size > PAYLOAD_LIMIT_BYTES:
        raise _too_large(size)
    control = _CALL_BYTES + name + count * _REFERENCE_BYTES + size + len(tensors)
    head = _CALL_FRAME.pack(
        _CALL,
        flags,
        0,
        control,
        0,
        remaining_s,
        creation,
        context_id,
        message_id,
        name,
        count,
        size,
    )
    # Not one empty array for all: threads without the interpreter lock would wait for it.
    return bytearray().join((head, function, handed, payload, tensors))


def encode_post(port: int, head: bytes, tensors: bytes) -> bytes:
    """Returns the whole frame of a ``POST`` with the flag ``PLAIN``."""
    size = len(head)
    control = 1 + size + len(tensors)
    front = _POST_FRAME.pack(_POST, PLAIN, 0, control, port, size)
    return b"".join((front, head, tensors))


def decode_post(control: Buffer) -> tuple[bytes, int]:
    """Returns the head of such a ``POST``, and where its tensors begin.

    Raises:
        ProtocolError: It is malformed.
    """
    end = control[0] + 1 if control else 1
    if end > len(control):
        raise ProtocolError(f"a message for a port has {len(control)} bytes, and its head {end}")
    return bytes(control[1:end]), end


def code_names(numbers: Sequence[int]) -> bytes:
    """Returns the numbers of the codes that a call names, as they stand before the call.

    Args:
        numbers: The numbers, at most ``MAX_CODES``.
    """
    if len(numbers) == 1:
        return _ONE_CODE.pack(1, numbers[0])
    return _CODES.pack(len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)


def with_code(call: bytearray, names: bytes) -> bytearray:
    """Returns the frame of a ``CALL_WITH_CODE``.

    Args:
        call: The frame of a call, as ``encode_call`` returned it.
        names: The output of ``code_names``.
    """
    _, flags, count, size, number = HEADER.unpack_from(call)
    head = HEADER.pack(_CALL_WITH_CODE, flags, count, size + len(names), number)
    return bytearray().join((head, names, memoryview(call)[HEADER_BYTES:]))


def in_span(call: Sequence[Buffer], context: bytes) -> list[Buffer]:
    """Returns the pieces of a ``CALL_IN_SPAN``.

    Args:
        call: The pieces of a ``CALL`` or a ``CALL_WITH_CODE``; the first one has the whole control
            part.
        context: The context of the span, at most ``MAX_SPAN_BYTES``.
    """
    first = memoryview(call[0])
    kind, flags, count, size, number = HEADER.unpack_from(first)
    begin = HEADER_BYTES + 8 * count
    front = _SPAN_HEAD.pack(kind, len(context))
    head = HEADER.pack(_CALL_IN_SPAN, flags, count, size + len(front) + len(context), number)
    lengths, control = first[HEADER_BYTES:begin], first[begin:]
    return [b"".join((head, lengths, front, context, control)), *call[1:]]


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


def decode_span(control: Buffer) -> tuple[int, bytes, Buffer]:
    """Returns the kind of the call in a ``CALL_IN_SPAN``, the context, and the call.

    Raises:
        ProtocolError: It is malformed.
    """
    kind, start = span_front(control)
    if start > len(control) or kind not in (_CALL, _CALL_WITH_CODE):
        raise ProtocolError(
            f"a call in a span of {len(control)} bytes has a context up to byte {start}, and a "
            f"message of kind {kind}"
        )
    return kind, bytes(control[_SPAN_HEAD.size : start]), control[start:]


def span_front(control: Buffer) -> tuple[int, int]:
    """Returns the kind of the call in a ``CALL_IN_SPAN``, and where the call begins.

    Raises:
        ProtocolError: It is too short.
    """
    if len(control) < _SPAN_HEAD.size:
        raise ProtocolError(f"a call in a span of {len(control)} bytes is too short")
    kind, size = _SPAN_HEAD.unpack_from(control)
    return kind, _SPAN_HEAD.size + size


def encode_call_front(
    remaining_s: float,
    creation: int,
    context_id: int,
    message_id: int,
    function: bytes,
    references: Sequence[HandedReference],
    payload: bytes,
) -> bytes:
    """Returns a ``CALL`` without its tensors; see ``encode_call``."""
    name, count, size = len(function), len(references), len(payload)
    if size > PAYLOAD_LIMIT_BYTES:
        raise _too_large(size)
    head = _CALL_HEAD.pack(remaining_s, creation, context_id, message_id, name, count, size)
    return b"".join((head, function, _encode_references(references), payload))


def encode_reply(
    number: int,
    flags: int,
    context_id: int,
    message_id: int,
    references: Sequence[HandedReference],
    payload: bytes,
    tensors: bytes = b"",
) -> bytes:
    """Returns the whole frame of a ``REPLY`` whose tensors stand in it.

    Raises:
        SerializationError: The payload is too large.
    """
    handed, count = b"", 0
    if references:
        handed, count = _encode_references(references), len(references)
    size = len(payload)
    if size > PAYLOAD_LIMIT_BYTES:
        raise _too_large(size)
    control = _REPLY_BYTES + count * _REFERENCE_BYTES + size + len(tensors)
    head = _REPLY_FRAME.pack(_REPLY, flags, 0, control, number, context_id, message_id, count, size)
    return b"".join((head, handed, payload, tensors))


def encode_row_reply(number: int, context_id: int, payload: bytes, tensors: bytes) -> bytes:
    """Does the same for a value without references and without a recorded message."""
    size = len(payload)
    control = _REPLY_BYTES + size + len(tensors)
    head = _REPLY_FRAME.pack(_REPLY, 0, 0, control, number, context_id, 0, 0, size)
    return head + payload + tensors


def encode_reply_front(
    context_id: int, message_id: int, references: Sequence[HandedReference], payload: bytes
) -> bytes:
    """Returns a ``REPLY`` without its tensors."""
    size = len(payload)
    if size > PAYLOAD_LIMIT_BYTES:
        raise _too_large(size)
    head = _REPLY_HEAD.pack(context_id, message_id, len(references), size)
    return b"".join((head, _encode_references(references), payload))


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
    remaining_s, creation, context_id, message_id, size, count, payload = _CALL_HEAD.unpack_from(
        control
    )
    start = name_end = _CALL_BYTES + size
    function = bytes(control[_CALL_BYTES:name_end])
    handed: Sequence[HandedReference] = ()
    if count:
        start += count * _REFERENCE_BYTES
        if start <= end:
            handed = _decode_references(control, name_end, start)
    payload_end = start + payload
    if payload_end > end:
        raise ProtocolError("the name, the references or the payload of a call are cut short")
    if creation < NO_CREATION or remaining_s != remaining_s:
        raise ProtocolError(f"a call makes value {creation}, and may take {remaining_s} s")
    if context_id and context_id >= _NUMBER_LIMIT and context_id != NO_GRAD:
        raise ProtocolError(f"a call names context {context_id}")
    if message_id and message_id >= _NUMBER_LIMIT:
        raise ProtocolError(f"a call has the message number {message_id}")
    return remaining_s, creation, function, (context_id, message_id, handed, start, payload_end)


REMAINING_BYTES = 8
"""Bytes of the caller's time limit, at the begin of a ``CALL``."""
CALL_HEAD_BYTES, REPLY_HEAD_BYTES = _CALL_BYTES, _REPLY_BYTES
"""Bytes at the begin of a ``CALL`` and a ``REPLY`` that have numbers only, no name and no value."""
CODES_BYTES = _CODES.size


class Sizes(NamedTuple):
    """The numbers in the head of a message with a value; see ``ValueHead`` and ``CallHead``."""

    creation: int
    context_id: int
    message_id: int
    before_tensors: int
    """Bytes of the control part before the tensors."""


def sizes_of_call(head: Buffer) -> Sizes:
    """Reads the first ``CALL_HEAD_BYTES`` of a ``CALL``."""
    _, creation, context_id, message_id, name, count, payload = _CALL_HEAD.unpack_from(head)
    before = _CALL_BYTES + name + count * _REFERENCE_BYTES + payload
    return Sizes(creation, context_id, message_id, before)


def sizes_of_reply(head: Buffer) -> Sizes:
    """Reads the first ``REPLY_HEAD_BYTES`` of a ``REPLY``."""
    context_id, message_id, count, payload = _REPLY_HEAD.unpack_from(head)
    before = _REPLY_BYTES + count * _REFERENCE_BYTES + payload
    return Sizes(NO_CREATION, context_id, message_id, before)


def decode_code_names(control: Buffer) -> tuple[tuple[int, ...], Buffer]:
    """Returns the numbers in a ``CALL_WITH_CODE``, and the ``CALL``; raises ProtocolError."""
    if len(control) < _CODES.size:
        raise ProtocolError(f"a call with code of {len(control)} bytes is too short")
    (count,) = _CODES.unpack_from(control)
    if count == 1 and len(control) >= _ONE_CODE.size:
        return _ONE_CODE.unpack_from(control)[1:], control[_ONE_CODE.size :]
    end = _CODES.size + 8 * count
    if len(control) < end:
        raise ProtocolError("the codes of a call are cut short")
    return struct.unpack_from(f"<{count}Q", control, _CODES.size), control[end:]


def encode_code(number: int, forgotten: Sequence[int], content: bytes) -> bytes:
    """Returns the control part of a ``CODE``.

    Args:
        number: The number under which the receiver keeps the code.
        forgotten: Numbers that it forgets before.
        content: The code.
    """
    head = _CODE_HEAD.pack(number, len(forgotten))
    return b"".join((head, struct.pack(f"<{len(forgotten)}Q", *forgotten), content))


def decode_code(control: Buffer) -> tuple[int, tuple[int, ...], bytes]:
    """Returns the parts of a ``CODE``; raises ProtocolError if it is malformed."""
    if len(control) < _CODE_HEAD.size:
        raise ProtocolError(f"a message with code of {len(control)} bytes is too short")
    number, count = _CODE_HEAD.unpack_from(control)
    end = _CODE_HEAD.size + 8 * count
    if len(control) < end:
        raise ProtocolError("the forgotten numbers of a message with code are cut short")
    forgotten = struct.unpack_from(f"<{count}Q", control, _CODE_HEAD.size)
    return number, forgotten, bytes(control[end:])


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
    """Returns the tensor table and the channel table at the end of a message with ``TABLES``.

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
