"""The messages with which workers count remote references, and their encoding.

All nine kinds are safe to repeat. Most concern one reference, which its owner counts. Three concern
one *handover*, a reference in transit inside a message, which its sender counts.
``docs/protocols/references.md`` says which worker sends each kind, when and why.

A batch of messages is a flat list of signed 64-bit integers, little-endian. Each message is its
kind, then its fields in order. A reference is its creator, owner and number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

NO_TOKEN = 0
"""Stands for no handover; tokens count from 1."""


@dataclass(slots=True)
class Hold:
    """User to owner: count me as a user. Version 0 is the hold that a creation implies.

    ``token`` ends the owner's handover that gave the user the reference, if any.
    """

    reference: ReferenceId
    version: int
    token: int


@dataclass(slots=True)
class HoldAck:
    """Owner to user: the value is made or being made, and you are counted as a user."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class Gone:
    """Owner to user: you are not counted; the value does not exist and never will again."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class Drop:
    """User to owner: count me no longer."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class DropAck:
    """Owner to user: no hold up to this version counts any more."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class NotCreated:
    """Creator to owner: the call that would have made this value will not come."""

    reference: ReferenceId


@dataclass(slots=True)
class Handed:
    """Receiver to sender of a handover: let it go."""

    token: int


@dataclass(slots=True)
class HandedAck:
    """Sender to receiver of a handover: it is let go."""

    token: int


@dataclass(slots=True)
class NotHanded:
    """Sender to receiver of a handover: the message with it will not come."""

    token: int


Message = Hold | HoldAck | Gone | Drop | DropAck | NotCreated | Handed | HandedAck | NotHanded
"""Every message of the protocol."""

_Reader = Callable[[tuple[int, ...], int], Message]
"""Builds a message from the integers at a given position."""


def _reference_at(integers: tuple[int, ...], at: int) -> ReferenceId:
    return ReferenceId(integers[at], integers[at + 1], integers[at + 2])


def _read_hold(integers: tuple[int, ...], at: int) -> Message:
    return Hold(_reference_at(integers, at), integers[at + 3], integers[at + 4])


def _reads_versioned(message_type: Callable[[ReferenceId, int], Message]) -> _Reader:
    return lambda integers, at: message_type(_reference_at(integers, at), integers[at + 3])


def _reads_token(message_type: Callable[[int], Message]) -> _Reader:
    return lambda integers, at: message_type(integers[at])


def _read_not_created(integers: tuple[int, ...], at: int) -> Message:
    return NotCreated(_reference_at(integers, at))


# The numbers are the wire format: never reuse a number for another kind.
_KINDS: dict[type[Message], int] = {
    Hold: 1,
    HoldAck: 2,
    Gone: 3,
    Drop: 4,
    DropAck: 5,
    NotCreated: 6,
    Handed: 7,
    HandedAck: 8,
    NotHanded: 9,
}

_READERS: dict[int, tuple[int, _Reader]] = {
    1: (5, _read_hold),
    2: (4, _reads_versioned(HoldAck)),
    3: (4, _reads_versioned(Gone)),
    4: (4, _reads_versioned(Drop)),
    5: (4, _reads_versioned(DropAck)),
    6: (3, _read_not_created),
    7: (1, _reads_token(Handed)),
    8: (1, _reads_token(HandedAck)),
    9: (1, _reads_token(NotHanded)),
}
"""By kind, how many integers follow and the reader for them."""


def encode(messages: Iterable[Message]) -> bytes:
    """Encodes a batch of messages."""
    integers: list[int] = []
    for message in messages:
        integers.append(_KINDS[type(message)])
        integers += _fields_of(message)
    return struct.pack(f"<{len(integers)}q", *integers)


def _fields_of(message: Message) -> tuple[int, ...]:
    if isinstance(message, Hold):
        return (*message.reference, message.version, message.token)
    if isinstance(message, (Handed, HandedAck, NotHanded)):
        return (message.token,)
    if isinstance(message, NotCreated):
        return message.reference
    return (*message.reference, message.version)


def decode(data: bytes | bytearray | memoryview) -> list[Message]:
    """Decodes a batch of messages.

    Raises:
        ProtocolError: ``data`` is not what ``encode`` makes.
    """
    integers = _integers_of(data)
    messages: list[Message] = []
    at = 0
    while at < len(integers):
        size, read = _READERS.get(integers[at], (0, None))
        if read is None:
            raise ProtocolError(f"no reference message has kind {integers[at]}")
        at += 1
        if at + size > len(integers):
            raise ProtocolError(
                f"a reference message of kind {integers[at - 1]} ends after "
                f"{len(integers) - at} of its {size} fields"
            )
        messages.append(read(integers, at))
        at += size
    return messages


def _integers_of(data: bytes | bytearray | memoryview) -> tuple[int, ...]:
    count, rest = divmod(len(data), 8)
    if rest:
        raise ProtocolError(f"{len(data)} bytes are no whole number of 64-bit integers")
    integers = struct.unpack(f"<{count}q", data)
    if integers and min(integers) < 0:
        raise ProtocolError(f"a reference message holds the negative number {min(integers)}")
    return integers
