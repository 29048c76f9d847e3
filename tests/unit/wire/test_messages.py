from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId
from torchweft.wire.frames import HEADER, HEADER_BYTES
from torchweft.wire.messages import (
    COMPACT,
    NO_CREATION,
    CallHead,
    HandedReference,
    Kind,
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

signed = st.integers(-(2**63), 2**63 - 1)
unsigned = st.integers(0, 2**64 - 1)
sections = st.binary(max_size=20)
handed = st.builds(HandedReference, st.builds(ReferenceId, signed, signed, signed), signed)
references = st.lists(handed, max_size=3).map(tuple)
HANDED = HandedReference(ReferenceId(1, 2, 3), 4)


def test_kinds_fit_the_header() -> None:
    assert all(0 < kind < 256 for kind in Kind)


@settings(max_examples=40)
@given(sections, sections, sections, sections, st.booleans())
def test_a_tensor_message_survives(
    head: bytes, payload: bytes, table: bytes, channels: bytes, is_view: bool
) -> None:
    control = encode_tensor_message(head, payload, table, channels)
    parts = decode_tensor_message(memoryview(control) if is_view else control)
    assert [bytes(part) for part in parts] == [head, payload, table, channels]


@settings(max_examples=40)
@given(
    st.builds(
        CallHead,
        remaining_s=st.floats(allow_nan=False),
        creation=signed,
        context_id=unsigned,
        message_id=unsigned,
        function=sections,
        references=references,
    )
)
def test_the_head_of_a_call_survives(head: CallHead) -> None:
    assert decode_call_head(encode_call_head(head)) == head
    assert decode_call_head(memoryview(encode_call_head(head))) == head


@settings(max_examples=40)
@given(st.builds(ReplyHead, context_id=unsigned, message_id=unsigned, references=references))
def test_the_head_of_a_reply_survives(head: ReplyHead) -> None:
    assert decode_reply_head(encode_reply_head(head)) == head


finite = st.floats(allow_nan=False)


@settings(max_examples=40)
@given(unsigned, finite, signed, unsigned, unsigned, sections, sections)
def test_a_compact_call_survives(
    number: int,
    remaining_s: float,
    creation: int,
    context_id: int,
    message_id: int,
    function: bytes,
    values: bytes,
) -> None:
    head = (remaining_s, creation, context_id, message_id, function)
    frame = encode_compact_call(number, *head, values)
    control = frame[HEADER_BYTES:]
    assert HEADER.unpack_from(frame) == (Kind.CALL, COMPACT, 0, len(control), number)
    *decoded, start = decode_compact_call(memoryview(control))
    assert tuple(decoded) == head
    assert control[start:] == values


@settings(max_examples=40)
@given(unsigned, unsigned, unsigned, sections)
def test_a_compact_reply_survives(
    number: int, context_id: int, message_id: int, values: bytes
) -> None:
    frame = encode_compact_reply(number, context_id, message_id, values)
    control = frame[HEADER_BYTES:]
    assert HEADER.unpack_from(frame) == (Kind.REPLY, COMPACT, 0, len(control), number)
    decoded = decode_compact_reply(memoryview(control))
    assert decoded[:2] == (context_id, message_id)
    assert control[decoded[2] :] == values


def test_the_head_of_a_compact_message_that_is_cut_is_refused() -> None:
    call = encode_compact_call(1, 2.0, 3, 4, 5, b"module:name", b"")[HEADER_BYTES:]
    reply = encode_compact_reply(1, 2, 3, b"")[HEADER_BYTES:]
    for decode, whole in ((decode_compact_call, call), (decode_compact_reply, reply)):
        decode(whole)
        for size in range(len(whole)):
            with pytest.raises(ProtocolError):
                decode(whole[:size])


def test_more_references_than_a_short_count_holds() -> None:
    many = (HANDED,) * 66_000
    call = decode_call_head(encode_call_head(CallHead(math.inf, NO_CREATION, 0, 0, b"f", many)))
    reply = decode_reply_head(encode_reply_head(ReplyHead(0, 0, many)))
    assert len(call.references) == len(reply.references) == 66_000
    assert call.references[-1] == reply.references[-1] == HANDED


@settings(max_examples=40)
@given(st.lists(signed, max_size=5))
def test_integers_survive(values: list[int]) -> None:
    assert decode_ints(encode_ints(*values)) == tuple(values)


Decode = Callable[[bytes], object]
DECODERS: list[tuple[Decode, bytes]] = [
    (decode_tensor_message, encode_tensor_message(b"head", b"payload", b"table", b"channels")),
    (decode_call_head, encode_call_head(CallHead(1.0, 2, 3, 4, b"name", (HANDED, HANDED)))),
    (decode_reply_head, encode_reply_head(ReplyHead(1, 2, (HANDED,)))),
]


@pytest.mark.parametrize(("decode", "valid"), DECODERS)
def test_cut_or_lengthened_bytes_are_refused(decode: Decode, valid: bytes) -> None:
    for size in range(len(valid)):
        with pytest.raises(ProtocolError):
            decode(valid[:size])
    with pytest.raises(ProtocolError):
        decode(valid + b"x")


@settings(max_examples=60)
@given(
    st.sampled_from([*(decode for decode, _ in DECODERS), decode_ints]),
    st.one_of(
        st.binary(max_size=120),
        st.lists(st.integers(0, 60), max_size=30).map(
            lambda values: b"".join(value.to_bytes(4, "little") for value in values)
        ),
    ),
)
def test_any_bytes_are_decoded_or_refused(decode: Decode, data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        return
    assert data or decode is decode_ints
