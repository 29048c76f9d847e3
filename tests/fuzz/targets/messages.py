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
    CallHead,
    HandedReference,
    ReplyHead,
    decode_call_head,
    decode_compact_call,
    decode_compact_reply,
    decode_ints,
    decode_reply_head,
    decode_tensor_message,
    encode_call_head,
    encode_compact_call,
    encode_compact_reply,
    encode_ints,
    encode_reply_head,
    encode_tensor_message,
)


def _tensor_message(data: memoryview) -> bytes:
    return encode_tensor_message(*[bytes(section) for section in decode_tensor_message(data)])


def _compact_call(data: memoryview) -> bytes:
    *head, name, start = decode_compact_call(data)
    assert start <= len(data)
    return encode_compact_call(0, *head, name, bytes(data[start:]))[HEADER_BYTES:]


def _compact_reply(data: memoryview) -> bytes:
    context_id, message_id, start = decode_compact_reply(data)
    return encode_compact_reply(0, context_id, message_id, bytes(data[start:]))[HEADER_BYTES:]


_TRIPS: tuple[Callable[[memoryview], bytes], ...] = (
    _tensor_message,
    lambda data: encode_call_head(decode_call_head(data)),
    lambda data: encode_reply_head(decode_reply_head(data)),
    lambda data: encode_ints(*decode_ints(data)),
    _compact_call,
    _compact_reply,
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
    """Returns one or two messages for every decoder."""
    handed = HandedReference(ReferenceId(1, 2, 3), 4)
    call = encode_call_head(CallHead(1.5, 2, 3, 4, b"module:name", (handed, handed)))
    simple = encode_call_head(CallHead(math.inf, NO_CREATION, 0, 0, b"", ()))
    reply = encode_reply_head(ReplyHead(3, 4, (handed,)))
    compact_call = encode_compact_call(1, 2.0, 3, 4, 5, b"module:name", b"values")
    return [
        b"\0" + encode_tensor_message(call, b"payload", b"table", b"channels"),
        b"\0" + encode_tensor_message(b"", b"", b"", b""),
        b"\1" + call,
        b"\1" + simple,
        b"\2" + reply,
        b"\2" + encode_reply_head(ReplyHead(0, 0, ())),
        b"\3" + encode_ints(1, -1, 1 << 62),
        b"\4" + compact_call[HEADER_BYTES:],
        b"\5" + encode_compact_reply(1, 2, 3, b"values")[HEADER_BYTES:],
    ]


TARGET = Target("messages", run, seeds, length_limit=256)
