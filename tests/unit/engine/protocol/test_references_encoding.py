from __future__ import annotations

import struct

import pytest

from tests.fuzz.targets.references import EVERY_KIND
from tests.tables import cases
from torchweft.engine.protocol.references import (
    Handed,
    Hold,
    Message,
    decode,
    encode,
)
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

REFERENCE = ReferenceId(creator=1, owner=2, number=3)


@cases("message", EVERY_KIND)
def test_a_message_survives(message: Message) -> None:
    (decoded,) = decode(encode([message]))
    assert type(decoded) is type(message)
    assert decoded == message


def test_the_bytes_are_those_of_the_first_version() -> None:
    assert encode([Hold(REFERENCE, 4, 5), Handed(6)]) == struct.pack("<8q", 1, 1, 2, 3, 4, 5, 7, 6)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\1", "1 bytes are no list"),
        (struct.pack("<q", 0), "no reference message has kind 0"),
        (struct.pack("<q", 8), "no reference message has kind 8"),
        (struct.pack("<q", 7), "kind 7 ends after 0 of its 1 fields"),
        (struct.pack("<4q", 1, 1, 2, 3), "kind 1 ends after 3 of its 5 fields"),
        (struct.pack("<2q", 7, -1), "negative number -1"),
    ],
)
def test_malformed_bytes_are_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(data)
