from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.wire.messages import (
    CALL_HEAD_BYTES,
    NO_CREATION,
    REPLY_HEAD_BYTES,
    HandedReference,
    decode_call,
    decode_reply,
    decode_step,
    decode_tables,
    encode_call,
    encode_ints,
    encode_reply,
    encode_tables,
)
from torchweft.errors import ProtocolError, SerializationError
from torchweft.ids import ID_LIMIT, ReferenceId

sections = st.binary(max_size=20)
natural = st.integers(0, 2**63 - 1)
workers = st.integers(0, ID_LIMIT - 1)
handed = st.builds(HandedReference, st.builds(ReferenceId, workers, workers, natural), natural)
references = st.lists(handed, max_size=3).map(tuple)
HANDED = HandedReference(ReferenceId(1, 2, 3), 4)


@settings(max_examples=examples(40))
@given(sections, sections, sections, st.booleans())
def test_tables_at_the_end_of_a_message_survive(
    front: bytes, tensors: bytes, channels: bytes, is_view: bool
) -> None:
    control = front + encode_tables(tensors, channels)
    tables = decode_tables(memoryview(control) if is_view else control)
    assert [bytes(table) for table in tables] == [tensors, channels]


class Endless(bytes):
    """Bytes that claim to be more than a message can have."""

    def __len__(self) -> int:
        return 1 << 32


def test_more_bytes_than_a_message_has_are_an_error_that_says_so() -> None:
    payload = Endless()
    for encode in (
        lambda: encode_call(1.0, 2, 3, 4, b"name", b"", (), payload),
        lambda: encode_reply(3, 4, (), payload),
    ):
        with pytest.raises(SerializationError, match="send them as tensors"):
            encode()


@pytest.mark.parametrize("texts", [b"boom", b"\xff", b"7", b'{"a": 1}', b"[1]", b"[" * 100_000])
def test_texts_of_a_step_are_a_list_of_texts(texts: bytes) -> None:
    with pytest.raises(ProtocolError, match="texts of a shutdown message"):
        decode_step(encode_ints(6, 0) + texts)


Decode = Callable[[bytes], object]
FRONTS: list[tuple[Decode, bytes]] = [
    (decode_call, encode_call(1.0, 2, 3, 4, b"name", b"span", (HANDED,), b"payload")),
    (decode_call, encode_call(1.0, NO_CREATION, 0, 0, b"", b"", (), b"")),
    (decode_reply, encode_reply(1, 2, (HANDED,), b"payload")),
    (decode_reply, encode_reply(0, 0, (), b"")),
]


@pytest.mark.parametrize(("decode", "valid"), FRONTS)
def test_the_front_of_a_message_that_is_cut_is_refused(decode: Decode, valid: bytes) -> None:
    decode(valid)
    for size in range(len(valid)):
        with pytest.raises(ProtocolError):
            decode(valid[:size])


@pytest.mark.parametrize(("decode", "valid"), FRONTS)
def test_numbers_that_lead_beyond_a_message_are_refused(decode: Decode, valid: bytes) -> None:
    # The last numbers of a head: the sizes of name, span and code of a call, and the last two.
    head_bytes = CALL_HEAD_BYTES if decode is decode_call else REPLY_HEAD_BYTES
    fields = [(head_bytes - 8, 4), (head_bytes - 4, 4)]
    if decode is decode_call:
        fields += [(head_bytes - 12, 4), (head_bytes - 14, 2), (head_bytes - 16, 2)]
    for place, size in fields:
        for number in ((1 << 8 * size) - 1, 1 << (8 * size - 1), 40):
            damaged = bytearray(valid)
            damaged[place : place + size] = number.to_bytes(size, "little")
            with pytest.raises(ProtocolError, match="cut short"):
                decode(bytes(damaged))


BEYOND = 1 << 63


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"creation": -2}, "makes value -2"),
        ({"remaining_s": float("nan")}, "may take nan"),
        ({"context_id": BEYOND}, "names context"),
        ({"message_id": BEYOND + 1}, "has the message number"),
        ({"references": [HandedReference(ReferenceId(1, 2, -2), 1)]}, "hands on value -2"),
        ({"references": [HandedReference(ReferenceId(1, 2, 3), -1)]}, "with token -1"),
        ({"references": [HandedReference(ReferenceId(ID_LIMIT, 2, 3), 1)]}, "by worker 32768"),
    ],
)
def test_numbers_out_of_range_are_refused_when_they_are_read(
    fields: dict[str, Any], said: str
) -> None:
    call: dict[str, Any] = {"remaining_s": 1.0, "creation": 3, "context_id": 0, "message_id": 0}
    call |= {"name": b"f", "span": b"", "references": (), "payload": b""} | fields
    with pytest.raises(ProtocolError, match=said):
        decode_call(encode_call(**call))
    answer = {name: call[name] for name in ("context_id", "message_id", "references", "payload")}
    if not fields.keys() & {"creation", "remaining_s"}:
        with pytest.raises(ProtocolError, match=said):
            decode_reply(memoryview(encode_reply(**answer)))
