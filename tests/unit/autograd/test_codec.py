from __future__ import annotations

import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.autograd.codec import PassMode, PassName, decode, decode_head, encode, encode_head
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
from torchweft.engine.wire.messages import encode_ints
from torchweft.errors import ProtocolError

numbers = st.integers(0, 2**63 - 1)
modes = st.builds(PassMode, st.booleans(), st.booleans(), st.booleans())
names = st.builds(PassName, numbers, st.just(9), numbers, modes)
id_lists = st.lists(st.integers(0, 2**63 - 1), max_size=3)


def in_part(draw: st.DrawFn, ids: list[int]) -> dict[int, int]:
    """Draws tensors of some messages."""
    some = draw(st.sets(st.sampled_from(ids))) if ids else set()
    return {each: draw(st.integers(1, 2**130)) for each in some}


@st.composite
def some_progress(draw: st.DrawFn) -> Progress:
    walked, executed, answered, reached = (draw(id_lists) for _ in range(4))
    parts = in_part(draw, walked), in_part(draw, reached)
    return Progress(walked, executed, answered, reached, *parts)


@st.composite
def some_discover(draw: st.DrawFn) -> Discover:
    ids = draw(id_lists)
    return Discover(tuple(ids), in_part(draw, ids))


progresses = some_progress()
messages: st.SearchStrategy[Message] = st.one_of(
    some_discover(),
    st.builds(Settled),
    st.builds(Report, progresses),
    st.builds(Failed, numbers, st.text(max_size=5), st.binary(max_size=5)),
    st.builds(Abort),
)
NAME = PassName(1, 9, 2, PassMode())
PROGRESS = Progress([3, 4], [4], [], [5, 6, 7])
IN_PART = {6: 0b101 << 100, 7: 1}
ONE_OF_EACH: list[Message] = [
    Discover((4, 5)),
    Settled(),
    Report(PROGRESS),
    Failed(3, "matmul über alles", b"\x00error"),
    Abort(),
]


def test_every_message_but_that_with_tensors_is_tried() -> None:
    assert {type(message) for message in ONE_OF_EACH} == set(typing.get_args(Message)) - {Gradients}


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_survives(message: Message) -> None:
    for name in (NAME, NAME._replace(mode=PassMode(True, True, True))):
        data = encode(name, message)
        assert decode(9, name.mode.flags, data) == (name, message)
        assert decode(9, name.mode.flags, memoryview(data)) == (name, message)


@pytest.mark.parametrize(
    "message",
    [
        Discover((6, 7, 8), IN_PART),
        Report(Progress([6, 7, 8], [6], [9], [])),
        Report(Progress([6], [6], [9], [5, 7, 6], {6: 3}, IN_PART)),
    ],
)
def test_the_tensors_of_messages_survive(message: Message) -> None:
    assert decode(9, 0, encode(NAME, message)) == (NAME, message)


@settings(max_examples=examples(50))
@given(names, messages)
def test_any_message_survives(name: PassName, message: Message) -> None:
    assert decode(9, name.mode.flags, encode(name, message)) == (name, message)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_that_is_cut_is_refused_or_another(message: Message) -> None:
    data = encode(NAME, message)
    for size in range(len(data)):
        try:
            name, shorter = decode(9, 0, data[:size])
        except ProtocolError:
            continue
        assert encode(name, shorter) == data[:size], "something was made up"


@pytest.mark.parametrize("sizes", [(7, -2), (-2, 7), (4, 2), (2, 2)])
def test_a_failure_whose_lengths_do_not_add_up_is_refused(sizes: tuple[int, int]) -> None:
    data = encode(NAME, Failed(3, "ab", b"err"))
    head = encode_ints(4, NAME.context_id, NAME.oldest_id, 3)
    assert data == head + encode_ints(2, 3) + b"aberr"
    with pytest.raises(ProtocolError, match="does not add up"):
        decode(9, 0, head + encode_ints(*sizes) + b"aberr")


@pytest.mark.parametrize("place", range(4))
def test_gradients_with_a_negative_number_are_refused(place: int) -> None:
    data = bytearray(encode_head(NAME, Gradients(7, (), PROGRESS), 3))
    data[8 * place : 8 * place + 8] = (-2).to_bytes(8, "little", signed=True)
    with pytest.raises(ProtocolError, match="out of range"):
        decode_head(9, 0, data)
    with pytest.raises(ProtocolError, match="tensors of no message"):
        decode_head(9, 0, encode_head(NAME, Gradients(7, (), Progress([-2]))))


@settings(max_examples=examples(80))
@given(
    st.binary(max_size=80)
    | st.lists(st.integers(-2, 9), max_size=9).map(lambda fields: encode_ints(*fields))
)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        _, message = decode(9, 0, data)
    except ProtocolError:
        return
    assert type(message) in typing.get_args(Message)


@settings(max_examples=examples(50))
@given(names, numbers, numbers, st.none() | progresses, st.binary(max_size=9))
def test_the_head_of_gradients_survives(
    name: PassName, message_id: int, recorded_id: int, progress: Progress | None, payload: bytes
) -> None:
    message = Gradients(message_id, ["not part of it"], progress)
    data = encode_head(name, message, recorded_id, len(payload))
    # A missing progress and an empty one are encoded the same.
    expected = Gradients(message_id, (), progress or None)
    decoded = decode_head(9, name.mode.flags, data + payload + b"tensors")
    assert decoded == (name, expected, recorded_id, len(data), len(data + payload))


def test_a_head_of_gradients_that_is_cut_is_refused() -> None:
    data = encode_head(NAME, Gradients(8, [], PROGRESS), 0, 7) + b"payload"
    decode_head(9, 0, data)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_head(9, 0, data[:size])
