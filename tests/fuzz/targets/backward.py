"""Messages of backward passes: bytes decode to a message or are refused; no list is made up."""

from __future__ import annotations

from tests.fuzz.target import Target
from torchweft.autograd.codec import PassMode, PassName, decode, encode
from torchweft.engine.protocol.backward import (
    Abort,
    Discover,
    Failed,
    Gradients,
    Message,
    Progress,
    Report,
    Settled,
)
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError

_PASS_ID = 9


def _read_message(data: memoryview) -> None:
    name, message, *_ = decode(Kind.BACKWARD, _PASS_ID, 0, data)
    encoded = encode(name, message)
    assert decode(Kind.BACKWARD, _PASS_ID, 0, encoded)[:2] == (name, message)
    if isinstance(message, Failed):
        assert isinstance(message.error, bytes)
        assert len(message.error) <= len(data)


def _read_head(data: memoryview) -> None:
    name, gradients, recorded_id, start, end = decode(Kind.GRADIENTS, _PASS_ID, 0, data)
    assert start <= end <= len(data)
    head = encode(name, gradients, recorded_id, bytes(data[start:end]))
    assert head == data[:end], "something was made up"


def run(data: bytes) -> Exception | None:
    """Reads a message, or the head of gradients, by the first byte."""
    if not data:
        return None
    try:
        (_read_head if data[0] & 1 else _read_message)(memoryview(data)[1:])
    except ProtocolError as error:
        return error
    return None


def seeds() -> list[bytes]:
    """Returns every kind of message."""
    name, progress = PassName(1, _PASS_ID, 2, PassMode()), Progress([3, 4], [4], [], [5, 6, 7])
    messages: tuple[Message, ...] = (
        Discover((4, 5)),
        Settled(),
        Report(progress),
        Report(Progress()),
        Failed(3, "matmul", b"\x00error"),
        Abort(),
    )
    heads = [encode(name, Gradients(8, [], told), 0, b"payload") for told in (None, progress)]
    return [b"\0" + encode(name, message) for message in messages] + [
        b"\1" + head + b" and tensors" for head in heads
    ]


TARGET = Target("backward", run, seeds, length_limit=256)
