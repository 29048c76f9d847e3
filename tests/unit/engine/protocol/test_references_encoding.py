from __future__ import annotations

import struct
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets.references import EVERY_KIND
from tests.tables import cases
from tests.thorough import examples
from torchweft.engine.protocol.references import (
    Handed,
    Hold,
    Message,
    NotCreated,
    decode,
    encode,
)
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

REFERENCE = ReferenceId(creator=1, owner=2, number=3)


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in EVERY_KIND} == set(typing.get_args(Message))


@cases("message", EVERY_KIND)
def test_a_message_survives(message: Message) -> None:
    (decoded,) = decode(encode([message]))
    assert type(decoded) is type(message)
    assert decoded == message


def test_a_batch_keeps_its_order() -> None:
    batch = [*EVERY_KIND, *reversed(EVERY_KIND)]
    assert decode(encode(batch)) == batch


def test_an_empty_batch_is_empty() -> None:
    assert encode([]) == b""
    assert decode(b"") == []


def test_references_stay_references() -> None:
    (decoded,) = decode(encode([NotCreated(REFERENCE)]))
    assert isinstance(decoded, NotCreated)
    assert isinstance(decoded.reference, ReferenceId)


def test_the_bytes_are_those_of_the_first_version() -> None:
    assert encode([Hold(REFERENCE, 4, 5), Handed(6)]) == struct.pack("<8q", 1, 1, 2, 3, 4, 5, 7, 6)


def test_numbers_of_63_bits_survive() -> None:
    largest = 2**63 - 1
    message = Hold(ReferenceId(largest, largest, largest), largest, largest)
    assert decode(encode([message])) == [message]


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


@given(
    st.binary(max_size=80)
    | st.lists(st.integers(-1, 10), max_size=12).map(
        lambda integers: struct.pack(f"<{len(integers)}q", *integers)
    )
)
@settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        messages = decode(data)
    except ProtocolError:
        return
    assert encode(messages) == data
