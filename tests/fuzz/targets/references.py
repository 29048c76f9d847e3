"""Messages about remote references: accepted bytes are exactly what the encoder makes."""

from __future__ import annotations

from tests.fuzz.target import Target
from torchweft.engine.protocol.references import (
    Drop,
    DropAck,
    Gone,
    Handed,
    Hold,
    HoldAck,
    Message,
    NotCreated,
    NotHanded,
    decode,
    encode,
)
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

_REFERENCE = ReferenceId(1, 2, 3)
EVERY_KIND: tuple[Message, ...] = (
    Hold(_REFERENCE, 4, 5),
    HoldAck(_REFERENCE, 6),
    Gone(_REFERENCE, 7),
    Drop(_REFERENCE, 8),
    DropAck(_REFERENCE, 9),
    NotCreated(_REFERENCE),
    Handed(10),
    NotHanded(11),
)


def run(data: bytes) -> Exception | None:
    """Decodes a batch of messages."""
    try:
        messages = decode(memoryview(data))
    except ProtocolError as error:
        return error
    assert encode(messages) == data, "something was made up"
    return None


def seeds() -> list[bytes]:
    """Returns every kind of message alone, and all together."""
    return [encode([message]) for message in EVERY_KIND] + [encode(EVERY_KIND), b""]


TARGET = Target("references", run, seeds)
