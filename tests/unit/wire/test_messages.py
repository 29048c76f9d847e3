from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.errors import ProtocolError, SerializationError
from torchweft.ids import ID_LIMIT, ReferenceId
from torchweft.wire.frames import HEADER, HEADER_BYTES, encode_frame
from torchweft.wire.messages import (
    CAPTURED,
    ERROR_REPLY,
    MAX_SPAN_BYTES,
    NO_CREATION,
    NO_GRAD,
    NUMBER,
    NUMBER_OFFSET,
    PLAIN,
    POSITIONAL,
    TABLES,
    HandedReference,
    Kind,
    code_names,
    decode_call,
    decode_code,
    decode_code_names,
    decode_ints,
    decode_pass_span,
    decode_post,
    decode_reply,
    decode_span,
    decode_step,
    decode_tables,
    encode_call,
    encode_call_front,
    encode_code,
    encode_ints,
    encode_post,
    encode_reply,
    encode_reply_front,
    encode_tables,
    encode_texts,
    in_span,
    pass_span,
    with_code,
)

unsigned = st.integers(0, 2**64 - 1)
sections = st.binary(max_size=20)
natural = st.integers(0, 2**63 - 1)
contexts = natural | st.just(NO_GRAD)
workers = st.integers(0, ID_LIMIT - 1)
handed = st.builds(HandedReference, st.builds(ReferenceId, workers, workers, natural), natural)
references = st.lists(handed, max_size=3).map(tuple)
flags = st.integers(0, 15)
numbers = st.lists(unsigned, max_size=5).map(tuple)
tensor_parts = st.lists(sections, max_size=3)
HANDED = HandedReference(ReferenceId(1, 2, 3), 4)


def test_kinds_fit_the_header() -> None:
    assert all(0 < kind < 256 for kind in Kind)


def test_flags_are_single_bits_of_their_own() -> None:
    bits = (ERROR_REPLY, TABLES, POSITIONAL, CAPTURED)
    assert sum(bits) == ERROR_REPLY | TABLES | POSITIONAL | CAPTURED == 15


call_heads = st.tuples(
    *(st.floats(allow_nan=False), st.integers(NO_CREATION, 2**63 - 1), contexts, natural),
    *(sections, references, sections),
)


@settings(max_examples=examples(60))
@given(unsigned, flags, call_heads, tensor_parts, st.booleans())
def test_a_call_survives(
    number: int, flags: int, head: tuple[Any, ...], tensors: list[bytes], is_view: bool
) -> None:
    *_, payload = head
    inside = b"".join(tensors)
    frame = encode_call(flags, *head, inside)
    NUMBER.pack_into(frame, NUMBER_OFFSET, number)
    control = frame[HEADER_BYTES:]
    assert HEADER.unpack_from(frame) == (Kind.CALL, flags, 0, len(control), number)
    remaining_s, creation, name, value = decode_call(memoryview(control) if is_view else control)
    context_id, message_id, handed, start, end = value
    assert (remaining_s, creation, context_id, message_id, name, handed) == head[:-1]
    assert control[start:end] == payload
    assert control[end:] == inside
    assert encode_call_front(*head) + inside == control


@settings(max_examples=examples(60))
@given(unsigned, flags, call_heads, sections, numbers, st.booleans())
def test_a_call_with_code_is_a_call_behind_the_numbers_of_its_codes(
    number: int,
    flags: int,
    head: tuple[Any, ...],
    tensors: bytes,
    codes: tuple[int, ...],
    is_view: bool,
) -> None:
    call = encode_call(flags, *head, tensors)
    frame = with_code(call, code_names(codes))
    NUMBER.pack_into(frame, NUMBER_OFFSET, number)
    control = frame[HEADER_BYTES:]
    assert HEADER.unpack_from(frame) == (Kind.CALL_WITH_CODE, flags, 0, len(control), number)
    decoded, rest = decode_code_names(memoryview(control) if is_view else control)
    assert decoded == codes
    assert rest == call[HEADER_BYTES:]


@settings(max_examples=examples(60))
@given(unsigned, flags, call_heads, sections, numbers, sections, st.booleans())
def test_a_call_in_a_span_is_a_call_behind_the_context_of_the_span(
    number: int,
    flags: int,
    head: tuple[Any, ...],
    tensors: bytes,
    codes: tuple[int, ...],
    context: bytes,
    is_view: bool,
) -> None:
    call = encode_call(flags, *head, tensors)
    for inner in (call, with_code(call, code_names(codes))):
        NUMBER.pack_into(inner, NUMBER_OFFSET, number)
        (frame,) = in_span([inner], context)
        control = frame[HEADER_BYTES:]
        assert HEADER.unpack_from(frame) == (Kind.CALL_IN_SPAN, flags, 0, len(control), number)
        decoded = decode_span(memoryview(control) if is_view else control)
        assert decoded == (inner[0], context, inner[HEADER_BYTES:])


@pytest.mark.parametrize("sizes", [(10,), (10, 5000), (5000, 0, 7)])
def test_buffers_follow_a_call_in_a_span_as_they_followed_the_call(sizes: tuple[int, ...]) -> None:
    buffers = [memoryview(bytes([place] * size)) for place, size in enumerate(sizes)]
    sent = b"".join(in_span(encode_frame(Kind.CALL, 2, 7, b"a call", buffers), b"context"))
    kind, flags, count, size, number = HEADER.unpack_from(sent)
    assert (kind, flags, count, number) == (Kind.CALL_IN_SPAN, 2, len(sizes), 7)
    assert struct.unpack_from(f"<{count}Q", sent, HEADER_BYTES) == sizes
    begin = HEADER_BYTES + 8 * count
    assert decode_span(sent[begin : begin + size]) == (Kind.CALL, b"context", b"a call")
    assert sent[begin + size :] == b"".join(buffers)


@pytest.mark.parametrize("control", [b"", b"\x03", b"\x03\xff\xff", b"\x04\0\0", b"\x1e\0\0rest"])
def test_a_malformed_call_in_a_span_is_refused(control: bytes) -> None:
    with pytest.raises(ProtocolError, match="a call in a span"):
        decode_span(control)


def test_the_context_of_a_pass_is_in_a_message_of_its_own() -> None:
    (frame,) = pass_span(12, 5, b"context")
    assert HEADER.unpack_from(frame) == (Kind.PASS_SPAN, 0, 0, 15, 12)
    assert decode_pass_span(memoryview(frame)[HEADER_BYTES:]) == (5, b"context")
    with pytest.raises(ProtocolError, match="the context of a pass has 8193 bytes"):
        decode_pass_span(bytes(MAX_SPAN_BYTES + 9))


@settings(max_examples=examples(60))
@given(unsigned, numbers, sections, st.booleans())
def test_code_survives(
    number: int, forgotten: tuple[int, ...], content: bytes, is_view: bool
) -> None:
    control = encode_code(number, forgotten, content)
    decoded = decode_code(memoryview(control) if is_view else control)
    assert decoded == (number, forgotten, content)


@settings(max_examples=examples(60))
@given(
    unsigned,
    flags,
    st.tuples(contexts, natural, references, sections),
    tensor_parts,
    st.booleans(),
)
def test_a_reply_survives(
    number: int, flags: int, head: tuple[Any, ...], tensors: list[bytes], is_view: bool
) -> None:
    *_, payload = head
    inside = b"".join(tensors)
    frame = encode_reply(number, flags, *head, inside)
    control = frame[HEADER_BYTES:]
    assert HEADER.unpack_from(frame) == (Kind.REPLY, flags, 0, len(control), number)
    *decoded, start, end = decode_reply(memoryview(control) if is_view else control)
    assert tuple(decoded) == head[:-1]
    assert control[start:end] == payload
    assert control[end:] == inside
    assert encode_reply_front(*head) + inside == control


@settings(max_examples=examples(40))
@given(sections, sections, sections, st.booleans())
def test_tables_at_the_end_of_a_message_survive(
    front: bytes, tensors: bytes, channels: bytes, is_view: bool
) -> None:
    control = front + encode_tables(tensors, channels)
    tables = decode_tables(memoryview(control) if is_view else control)
    assert [bytes(table) for table in tables] == [tensors, channels]


def test_more_references_than_a_short_count_holds() -> None:
    many = (HANDED,) * 66_000
    call = decode_call(encode_call_front(math.inf, NO_CREATION, 0, 0, b"f", many, b"payload"))
    reply = decode_reply(encode_reply_front(0, 0, many, b"payload"))
    (*_, (_, _, of_call, *_)), (_, _, of_reply, *_) = call, reply
    assert len(of_call) == len(of_reply) == 66_000
    assert of_call[-1] == of_reply[-1] == HANDED


class Endless(bytes):
    """Bytes that claim to be more than a message can have."""

    def __len__(self) -> int:
        return 1 << 32


def test_more_bytes_than_a_message_has_are_an_error_that_says_so() -> None:
    payload = Endless()
    for encode in (
        lambda: encode_call(0, 1.0, 2, 3, 4, b"name", (), payload),
        lambda: encode_call_front(1.0, 2, 3, 4, b"name", (), payload),
        lambda: encode_reply(1, 0, 3, 4, (), payload),
        lambda: encode_reply_front(3, 4, (), payload),
    ):
        with pytest.raises(SerializationError, match="send them as tensors"):
            encode()


@settings(max_examples=examples(40))
@given(st.lists(natural, max_size=5))
def test_integers_survive(values: list[int]) -> None:
    assert decode_ints(encode_ints(*values)) == tuple(values)


@settings(max_examples=examples(40))
@given(natural, st.lists(natural, max_size=5), st.lists(st.text(max_size=5), max_size=3))
def test_steps_survive(step: int, arguments: list[int], texts: list[str]) -> None:
    control = encode_ints(step, len(arguments), *arguments) + encode_texts(texts)
    assert decode_step(control) == (step, arguments, texts)


@pytest.mark.parametrize(
    "control", [encode_ints(6), encode_ints(6, -1), encode_ints(6, 2, 1), encode_ints(6, 1 << 62)]
)
def test_a_step_with_a_wrong_count_is_refused(control: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"shutdown message|integers"):
        decode_step(control)


@pytest.mark.parametrize("texts", [b"boom", b"\xff", b"7", b'{"a": 1}', b"[1]", b"[" * 100_000])
def test_texts_of_a_step_are_a_list_of_texts(texts: bytes) -> None:
    with pytest.raises(ProtocolError, match="texts of a shutdown message"):
        decode_step(encode_ints(6, 0) + texts)


Decode = Callable[[bytes], object]
FRONTS: list[tuple[Decode, bytes]] = [
    (decode_call, encode_call_front(1.0, 2, 3, 4, b"name", (HANDED, HANDED), b"payload")),
    (decode_call, encode_call_front(1.0, NO_CREATION, 0, 0, b"", (), b"")),
    (decode_reply, encode_reply_front(1, 2, (HANDED,), b"payload")),
    (decode_reply, encode_reply_front(0, 0, (), b"")),
]


@pytest.mark.parametrize(("decode", "valid"), FRONTS)
def test_the_front_of_a_message_that_is_cut_is_refused(decode: Decode, valid: bytes) -> None:
    decode(valid)
    for size in range(len(valid)):
        with pytest.raises(ProtocolError):
            decode(valid[:size])


@pytest.mark.parametrize("decode", [decode_code_names, decode_code])
def test_code_that_is_cut_is_refused(decode: Decode) -> None:
    for count in (1, 2, 3):
        names, code = code_names(range(count)), encode_code(7, range(count), b"")
        valid = names if decode is decode_code_names else code
        decode(valid)
        for size in range(len(valid)):
            with pytest.raises(ProtocolError):
                decode(valid[:size])
    for count in (b"\xff\xff", b"\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode(b"" if decode is decode_code_names else bytes(8) + count + bytes(40))


@pytest.mark.parametrize(("decode", "valid"), FRONTS)
def test_numbers_that_lead_beyond_a_message_are_refused(decode: Decode, valid: bytes) -> None:
    # The last numbers of a head: the size of a call's name, the references, and the payload.
    head_bytes = 42 if decode is decode_call else 24
    fields = [(head_bytes - 8, 4), (head_bytes - 4, 4)]
    fields += [(head_bytes - 10, 2)] if decode is decode_call else []
    for place, size in fields:
        for number in ((1 << 8 * size) - 1, 1 << (8 * size - 1), 40):
            damaged = bytearray(valid)
            damaged[place : place + size] = number.to_bytes(size, "little")
            with pytest.raises(ProtocolError, match="cut short"):
                decode(bytes(damaged))


@settings(max_examples=examples(60))
@given(unsigned, st.binary(max_size=255), sections)
def test_a_plain_message_for_a_port(port: int, head: bytes, tensors: bytes) -> None:
    frame = encode_post(port, head, tensors)
    kind, flags, count, size, number = HEADER.unpack_from(frame)
    assert (kind, flags, count, number) == (Kind.POST, PLAIN, 0, port)
    control = frame[HEADER_BYTES:]
    assert len(control) == size
    found, start = decode_post(control)
    assert (found, control[start:]) == (head, tensors)
    for cut in range(len(head) + 1):
        with pytest.raises(ProtocolError, match="and its head"):
            decode_post(control[:cut])


def test_tables_that_are_longer_than_their_message_are_refused() -> None:
    valid = encode_tables(b"table", b"channels")
    for size in range(len(valid) + 1):
        if size:
            with pytest.raises(ProtocolError):
                decode_tables(valid[size:])
    for sizes in ((6, 8), (5, 9), (0xFFFFFFFF, 0), (0, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF)):
        with pytest.raises(ProtocolError, match="longer than the message"):
            decode_tables(b"tablechannels" + struct.pack("<II", *sizes))


@settings(max_examples=examples(60))
@given(
    st.sampled_from(
        [
            decode_call,
            decode_reply,
            decode_tables,
            decode_ints,
            decode_code,
            decode_code_names,
            decode_post,
            decode_step,
        ]
    ),
    st.one_of(
        st.binary(max_size=120),
        st.lists(st.integers(0, 60), max_size=30).map(
            lambda values: b"".join(value.to_bytes(4, "little") for value in values)
        ),
    ),
)
def test_any_bytes_are_decoded_or_refused(decode: Any, data: bytes) -> None:
    try:
        decoded = decode(data)
    except ProtocolError:
        return
    assert data or decode is decode_ints
    if decode in (decode_call, decode_reply):
        *_, start, end = decoded[-1] if decode is decode_call else decoded
        assert start <= end <= len(data)


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
    call |= {"function": b"f", "references": (), "payload": b""} | fields
    with pytest.raises(ProtocolError, match=said):
        decode_call(encode_call(0, **call)[HEADER_BYTES:])
    answer = {name: call[name] for name in ("context_id", "message_id", "references", "payload")}
    if not fields.keys() & {"creation", "remaining_s"}:
        with pytest.raises(ProtocolError, match=said):
            decode_reply(memoryview(encode_reply(1, 0, **answer))[HEADER_BYTES:])


def test_a_list_with_a_negative_number_is_refused() -> None:
    with pytest.raises(ProtocolError, match="negative number -1"):
        decode_ints(struct.pack("<2q", 5, -1))
