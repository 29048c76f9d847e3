"""The messages with which workers count remote references, and their encoding.

Most of the eight kinds concern one reference, which its owner counts. Two concern one *handover*, a
reference in transit inside a message, which its sender counts.
``docs/protocols/references.md`` says which worker sends each kind, when and why.

A batch of messages is a flat list of signed 64-bit integers, little-endian. Each message is its
kind, then its fields in order. A reference is its creator, owner and number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

NO_TOKEN = 0
"""Stands for no handover; tokens count from 1."""

_REFERENCE = "reference"


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
class NotHanded:
    """Sender to receiver of a handover: the message with it will not come."""

    token: int


Message = Hold | HoldAck | Gone | Drop | DropAck | NotCreated | Handed | NotHanded
"""Every message of the protocol."""

# The numbers are the wire format: never reuse a number for another kind.
_KINDS: dict[int, type[Message]] = {
    1: Hold,
    2: HoldAck,
    3: Gone,
    4: Drop,
    5: DropAck,
    6: NotCreated,
    7: Handed,
    9: NotHanded,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_NAMES: dict[type[Message], tuple[str, ...]] = {
    kind: tuple(each.name for each in fields(kind)) for kind in _KINDS.values()
}
"""The fields of each kind. A reference, if there is one, is the first, and takes three integers."""


def encode(messages: Iterable[Message]) -> bytes:
    """Encodes a batch of messages."""
    integers: list[int] = []
    for message in messages:
        kind = type(message)
        integers.append(_NUMBERS[kind])
        for name in _NAMES[kind]:
            value = getattr(message, name)
            integers += value if name == _REFERENCE else (value,)
    return struct.pack(f"<{len(integers)}q", *integers)


def decode(data: bytes | bytearray | memoryview) -> list[Message]:
    """Decodes a batch of messages.

    Raises:
        ProtocolError: ``data`` is not what ``encode`` makes.
    """
    integers = _integers_of(data)
    messages: list[Message] = []
    at = 0
    while at < len(integers):
        kind = _KINDS.get(integers[at])
        if kind is None:
            raise ProtocolError(f"no reference message has kind {integers[at]}")
        names = _NAMES[kind]
        has_reference = names[0] == _REFERENCE
        size = len(names) + 2 * has_reference
        values: list[Any] = list(integers[at + 1 : at + 1 + size])
        if len(values) < size:
            raise ProtocolError(
                f"a reference message of kind {integers[at]} ends after {len(values)} of its "
                f"{size} fields"
            )
        at += 1 + len(values)
        if has_reference:
            values[:3] = [ReferenceId(*values[:3])]
        messages.append(kind(*values))
    return messages


def _integers_of(data: bytes | bytearray | memoryview) -> tuple[int, ...]:
    count, rest = divmod(len(data), 8)
    if rest:
        raise ProtocolError(f"{len(data)} bytes are no whole number of 64-bit integers")
    integers = struct.unpack(f"<{count}q", data)
    if integers and min(integers) < 0:
        raise ProtocolError(f"a reference message holds the negative number {min(integers)}")
    return integers
