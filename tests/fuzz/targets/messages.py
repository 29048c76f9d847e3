"""The fixed parts of calls and replies: accepted bytes are exactly what the encoder makes."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.fuzz.target import Target
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId
from torchweft.wire.frames import HEADER_BYTES
from torchweft.wire.messages import (
    NO_CREATION,
    HandedReference,
    code_names,
    decode_call,
    decode_code,
    decode_code_names,
    decode_ints,
    decode_reply,
    decode_step,
    decode_tables,
    encode_call,
    encode_call_front,
    encode_code,
    encode_ints,
    encode_reply,
    encode_reply_front,
    encode_tables,
    encode_texts,
    with_code,
)


def _call(data: memoryview) -> bytes:
    remaining_s, creation, name, (context_id, message_id, references, start, end) = decode_call(
        data
    )
    head = (remaining_s, creation, context_id, message_id, name, references)
    assert start <= end <= len(data)
    payload, tensors = bytes(data[start:end]), bytes(data[end:])
    whole = bytes(encode_call(0, *head, payload, tensors)[HEADER_BYTES:])
    assert encode_call_front(*head, payload) + tensors == whole
    return whole


def _reply(data: memoryview) -> bytes:
    *head, start, end = decode_reply(data)
    assert start <= end <= len(data)
    payload, tensors = bytes(data[start:end]), bytes(data[end:])
    whole = encode_reply(0, 0, *head, payload, tensors)[HEADER_BYTES:]
    assert encode_reply_front(*head, payload) + tensors == whole
    return whole


def _call_with_code(data: memoryview) -> bytes:
    numbers, call = decode_code_names(data)
    frame = bytearray(HEADER_BYTES) + call
    return bytes(with_code(frame, code_names(numbers))[HEADER_BYTES:])


def _tables(data: memoryview) -> bytes:
    tables = [bytes(table) for table in decode_tables(data)]
    end = encode_tables(*tables)
    return bytes(data[: len(data) - len(end)]) + end


def _step(data: memoryview) -> bytes:
    step, arguments, texts = decode_step(data)
    # A list of texts has many forms in JSON: the message that is made again has the usual one.
    again = encode_ints(step, len(arguments), *arguments) + encode_texts(texts)
    assert decode_step(again) == (step, arguments, texts)
    return bytes(data)


_TRIPS: tuple[Callable[[memoryview], bytes], ...] = (
    _tables,
    _call,
    _reply,
    lambda data: encode_ints(*decode_ints(data)),
    lambda data: encode_code(*decode_code(data)),
    _call_with_code,
    _step,
)


def run(data: bytes) -> Exception | None:
    """Decodes the rest of ``data`` with the decoder that its first byte names."""
    if not data:
        return None
    trip, message = _TRIPS[data[0] % len(_TRIPS)], data[1:]
    try:
        again = trip(memoryview(message))
    except ProtocolError as error:
        return error
    assert again == message, "something was made up"
    return None


def seeds() -> list[bytes]:
    """Returns two messages for every decoder."""
    handed = HandedReference(ReferenceId(1, 2, 3), 4)
    call = encode_call_front(1.5, 2, 3, 4, b"module:name", (handed, handed), b"payload")
    simple = encode_call_front(math.inf, NO_CREATION, 0, 0, b"", (), b"")
    reply = encode_reply_front(3, 4, (handed,), b"payload")
    return [
        b"\0" + call + encode_tables(b"table", b"channels"),
        b"\0" + encode_tables(b"", b""),
        b"\1" + call + b"tensors",
        b"\1" + simple,
        b"\2" + reply + b"tensors",
        b"\2" + encode_reply_front(0, 0, (), b""),
        b"\3" + encode_ints(1, -1, 1 << 62),
        b"\3" + encode_ints(),
        b"\4" + encode_code(1 << 40, (3, 4), b"content"),
        b"\4" + encode_code(1, (), b""),
        b"\5" + code_names((1, 2, 1 << 40)) + call,
        b"\5" + code_names((5,)) + simple,
        b"\5" + code_names(()) + simple,
        b"\6" + encode_ints(1, 0),
        b"\6" + encode_ints(6, 2, 2, 3) + encode_texts(["end of file", ""]),
    ]


TARGET = Target("messages", run, seeds, length_limit=256)
