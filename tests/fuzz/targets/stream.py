"""All that a member of the group can send, from the socket to the decoded message.

Frames are parsed out of a stream and decoded by their kinds, as the handlers of a worker do it. A
payload that is a pickle stays unread: members may send pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.target import Target
from torchweft.autograd import codec
from torchweft.autograd.codec import PassMode
from torchweft.engine.channels.channel import Entry
from torchweft.engine.codec import values
from torchweft.engine.codec.tensors import (
    as_memory,
    decode_tensors,
    describe,
    encode_tensors,
    read,
    rebuild,
)
from torchweft.engine.protocol import references
from torchweft.engine.protocol.backward import Abort, Gradients, Progress
from torchweft.engine.wire.frames import Frame, FrameParser, encode_frame
from torchweft.engine.wire.messages import (
    ERROR_REPLY,
    TABLES,
    HandedReference,
    Kind,
    decode_call,
    decode_ints,
    decode_pass_span,
    decode_reply,
    decode_step,
    decode_tables,
    encode_call,
    encode_ints,
    encode_reply,
    encode_tables,
    encode_texts,
    pass_span,
)
from torchweft.engine.worker.tensor_messages import decode_table, encode_table
from torchweft.errors import ProtocolError, UnknownFunction, WeftError
from torchweft.ids import ReferenceId

_RECEIVE_BYTES = 256
_LIMIT_BYTES = 4096
_MAY_RAISE = (WeftError,)
"""A name in a value may raise any of them."""


def _read_tensors(frame: Frame, start: int, end: int) -> None:
    """Reads the value of a message, unless it is a pickle, and its tensors."""
    control, tensors = frame.control, list[torch.Tensor]()
    if not frame.flags & TABLES:
        tensors, _ = decode_tensors(control, end)
    else:
        tensor_table, channel_table = decode_tables(control)
        buffers = list(frame.buffers)
        table = decode_table(channel_table, [len(buffer) for buffer in buffers], _LIMIT_BYTES)
        if not table.entries and tensor_table:
            tensors, _ = rebuild(read(tensor_table), buffers)
    payload = control[start:end]
    if payload and payload[0] != values.PICKLE:
        values.decode(payload, tensors, (), _refuse)


def _refuse(name: bytes) -> None:
    raise UnknownFunction(f"no {name!r}")


def _read_call(frame: Frame) -> None:
    *_, (_, _, _, start, end) = decode_call(frame.control)
    _read_tensors(frame, start, end)


def _read_reply(frame: Frame) -> None:
    *_, start, end = decode_reply(frame.control)
    if not frame.flags & ERROR_REPLY:
        _read_tensors(frame, start, end)


def _read_pass(frame: Frame) -> tuple[Any, ...]:
    return codec.decode(frame.kind, frame.id, frame.flags, frame.control)


def _read_gradients(frame: Frame) -> None:
    *_, start, end = _read_pass(frame)
    _read_tensors(frame, start, end)


_READERS: dict[int, Callable[[Frame], object]] = {
    Kind.CALL: _read_call,
    Kind.POST: _read_call,
    Kind.PASS_SPAN: lambda frame: decode_pass_span(frame.control),
    Kind.REPLY: _read_reply,
    Kind.REFERENCES: lambda frame: references.decode(frame.control),
    Kind.PULLED: lambda frame: decode_ints(frame.control),
    Kind.SUPPLY: lambda frame: decode_ints(frame.control),
    Kind.BACKWARD: _read_pass,
    Kind.GRADIENTS: _read_gradients,
    Kind.RELEASE_CONTEXT: lambda frame: decode_ints(frame.control),
    Kind.SHUTDOWN: lambda frame: decode_step(frame.control),
}


def run(data: bytes) -> Exception | None:
    """Parses a stream and decodes all that is in it."""
    taken_bytes = 0

    def allocate(size_bytes: int) -> memoryview:
        nonlocal taken_bytes
        taken_bytes += size_bytes
        return memoryview(bytearray(size_bytes))

    parser = FrameParser(allocate, _RECEIVE_BYTES, _LIMIT_BYTES, _LIMIT_BYTES)
    frames: list[Frame] = []
    at = 0
    try:
        while at < len(data):
            space = parser.space()[0]
            piece = data[at : at + len(space)]
            space[: len(piece)] = piece
            at += len(piece)
            frames += parser.received(len(piece))
    except ProtocolError as error:
        return error
    assert taken_bytes <= len(data) + _LIMIT_BYTES
    refusal: Exception | None = None
    for frame in frames:
        reader = _READERS.get(frame.kind)
        if reader is not None:
            try:
                reader(frame)
            except _MAY_RAISE as error:
                refusal = error
    return refusal


def _frame(kind: Kind, flags: int, control: bytes, buffers: list[memoryview]) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(kind, flags, 7, control, buffers))


def seeds() -> list[bytes]:
    """Returns messages of every kind."""
    handed = HandedReference(ReferenceId(1, 2, 3), 4)
    table, flat = describe([torch.ones(3), torch.ones(2, 2).t()])
    buffers = [as_memory(tensor) for tensor in flat]
    fetched = encode_table(1, [Entry(2, 64, bytes(8))])
    given = (torch.ones(2), "text", torch.ones(2, 3, requires_grad=True).t(), None, 2.5, len)
    tensors: list[torch.Tensor] = []
    simple = values.encode(given, tensors, True)
    encoder = values.Encoder(True, ())
    payload = encoder.encode(([given[0], {"key": 1}], {"a": given[2]}))
    inlined = encode_tensors(tensors)
    assert simple is not None
    assert inlined is not None
    inside = inlined[0]
    call = (1.0, 2, 3, 4, b"module:name", b"traceparent:00-1", (handed,))
    reply = (3, 4, (handed,))
    name = codec.PassName(1, 7, 2, PassMode())
    gradients = Gradients(8, [], Progress([3], [4], [], [5]))
    head = codec.encode(name, gradients, 0, simple)
    by_tables = encode_tables(table, b"")
    front = encode_call(*call, payload)
    reply_front = encode_reply(*reply, b"\x80pickle")
    whole = [
        _frame(Kind.CALL, TABLES, front + by_tables, buffers),
        _frame(Kind.CALL, TABLES, front + encode_tables(table, fetched), []),
        _frame(Kind.REPLY, TABLES, reply_front + by_tables, buffers),
        _frame(Kind.CALL, 0, encode_call(*call, simple, inside), []),
        _frame(Kind.REPLY, 0, encode_reply(*reply, payload, inside), []),
        _frame(Kind.POST, 0, encode_call(*call, simple, inside), []),
        _frame(Kind.REFERENCES, 0, references.encode([references.Handed(3)]), []),
        _frame(Kind.BACKWARD, 0, codec.encode(name, Abort()), []),
        _frame(Kind.GRADIENTS, TABLES, head + by_tables, buffers),
        b"".join(pass_span(name.pass_id, name.context_id, b"traceparent:00-1")),
        _frame(Kind.GRADIENTS, 0, head + inside, []),
        _frame(Kind.REPLY, ERROR_REPLY, encode_reply(0, 0, (), b"an error"), []),
        *[_frame(kind, 0, encode_ints(5), []) for kind in (Kind.PULLED, Kind.SUPPLY)],
        _frame(Kind.RELEASE_CONTEXT, 0, encode_ints(1), []),
        _frame(Kind.SHUTDOWN, 0, encode_ints(6, 1, 2) + encode_texts(["end of file"]), []),
    ]
    return [*whole, whole[3] + whole[4] + whole[5], b"".join(whole)]


TARGET = Target("stream", run, seeds, length_limit=3072)
