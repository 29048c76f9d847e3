"""All that a member of the group can send, from the socket to the decoded message.

Frames are parsed out of a stream and decoded by their kinds, as the handlers of a worker do it. The
payload of a tensor message is a pickle and stays unread: members may send pickles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.fuzz.target import Target
from torchweft.autograd import codec
from torchweft.autograd.codec import PassMode
from torchweft.channel.table import BufferEntry, ChannelKind, decode_table, encode_table
from torchweft.errors import ProtocolError, SerializationError
from torchweft.ids import ReferenceId
from torchweft.protocol.backward import Abort, Gradients, Progress
from torchweft.serialize import compact
from torchweft.serialize.tensors import as_memory, describe, grad_flags, rebuild
from torchweft.wire import references
from torchweft.wire.frames import Buffer, Frame, FrameParser, encode_frame
from torchweft.wire.messages import (
    COMPACT,
    CallHead,
    HandedReference,
    Kind,
    ReplyHead,
    TensorMessageSections,
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

_RECEIVE_BYTES = 256
_LIMIT_BYTES = 4096
_MAY_RAISE = (ProtocolError, SerializationError)


def _read_tensor_message(control: Buffer, buffers: list[Buffer]) -> TensorMessageSections:
    sections = decode_tensor_message(control)
    sizes = [len(buffer) for buffer in buffers]
    table = decode_table(sections.channel_table, sizes, _LIMIT_BYTES)
    if not table.entries and sections.tensor_table:
        rebuild(sections.tensor_table, buffers)
        grad_flags(sections.tensor_table)
    return sections


def _read_call(frame: Frame) -> None:
    if frame.flags == COMPACT:
        *_, start = decode_compact_call(frame.control)
        compact.decode(frame.control, start, [], bytes)
    else:
        decode_call_head(_read_tensor_message(frame.control, list(frame.buffers)).head)


def _read_reply(frame: Frame) -> None:
    if frame.flags == COMPACT:
        *_, start = decode_compact_reply(frame.control)
        compact.decode(frame.control, start, [], bytes)
    else:
        decode_reply_head(_read_tensor_message(frame.control, list(frame.buffers)).head)


def _read_gradients(frame: Frame) -> None:
    *_, start = codec.decode_head(frame.id, frame.flags, frame.control)
    if frame.flags & codec.COMPACT:
        compact.decode(frame.control, start, [], bytes)
    else:
        _read_tensor_message(frame.control[start:], list(frame.buffers))


_READERS: dict[int, Callable[[Frame], object]] = {
    Kind.CALL: _read_call,
    Kind.REPLY: _read_reply,
    Kind.REFERENCES: lambda frame: references.decode(frame.control),
    Kind.PULLED: lambda frame: decode_ints(frame.control),
    Kind.SUPPLY: lambda frame: decode_ints(frame.control),
    Kind.BACKWARD: lambda frame: codec.decode(frame.id, frame.flags, frame.control),
    Kind.GRADIENTS: _read_gradients,
    Kind.RELEASE_CONTEXT: lambda frame: decode_ints(frame.control),
    Kind.SHUTDOWN: lambda frame: decode_ints(frame.control),
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
    fetched = encode_table(1, [BufferEntry(ChannelKind.CMA, 64, 0x7000)])
    values = compact.encode((torch.ones(2), "text", [1, None], {"key": 2.5}), [])
    assert values is not None
    call = encode_call_head(CallHead(1.0, 2, 3, 4, b"module:name", (handed,)))
    reply = encode_reply_head(ReplyHead(3, 4, (handed,)))
    name = codec.PassName(1, 7, 2, PassMode())
    head = codec.encode_head(name, Gradients(8, [], Progress([3], [4], [], [5])))
    whole = [
        _frame(Kind.CALL, 0, encode_tensor_message(call, b"pickle", table, b""), buffers),
        _frame(Kind.CALL, 0, encode_tensor_message(call, b"pickle", table, fetched), []),
        _frame(Kind.REPLY, 0, encode_tensor_message(reply, b"pickle", table, b""), buffers),
        encode_compact_call(7, 1.0, 2, 3, 4, b"module:name", values),
        encode_compact_reply(7, 3, 4, values),
        _frame(Kind.REFERENCES, 0, references.encode([references.Handed(3)]), []),
        _frame(Kind.BACKWARD, 0, codec.encode(name, Abort()), []),
        _frame(Kind.GRADIENTS, 0, head + encode_tensor_message(b"", b"", table, b""), buffers),
        _frame(Kind.GRADIENTS, codec.COMPACT, head + values, []),
        *[_frame(kind, 0, encode_ints(5), []) for kind in (Kind.PULLED, Kind.SUPPLY)],
        *[_frame(kind, 0, encode_ints(1), []) for kind in (Kind.RELEASE_CONTEXT, Kind.SHUTDOWN)],
    ]
    return [*whole, whole[3] + whole[4] + whole[5], b"".join(whole)]


TARGET = Target("stream", run, seeds, length_limit=2048)
