from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
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
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError

numbers = st.integers(0, 2**63 - 1)
modes = st.builds(PassMode, *(4 * [st.booleans()]))
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
# Names of classes, and a few texts of Weft; Python allows no zero in a name.
operations = st.text(max_size=5).filter(lambda text: "\0" not in text)
messages: st.SearchStrategy[Message] = st.one_of(
    some_discover(),
    st.builds(Settled),
    st.builds(Report, progresses),
    st.builds(Failed, numbers, operations, st.binary(max_size=5)),
    st.builds(Abort),
)
NAME = PassName(1, 9, 2, PassMode())
PROGRESS = Progress([3, 4], [4], [], [5, 6, 7])
ONE_OF_EACH: list[Message] = [
    Discover((4, 5)),
    Settled(),
    Report(PROGRESS),
    Failed(3, "matmul über alles", b"\x00error"),
    Abort(),
]


def control(flags: int, data: Buffer) -> tuple[PassName, Message]:
    return decode(Kind.BACKWARD, 9, flags, data)[:2]


@settings(max_examples=examples(50))
@given(names, messages)
def test_any_message_survives(name: PassName, message: Message) -> None:
    assert control(name.mode.flags, encode(name, message)) == (name, message)


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_of_another_length_is_refused(message: Message) -> None:
    data = encode(NAME, message)
    for other in [*(data[:size] for size in range(len(data))), data + b"more"]:
        with pytest.raises(ProtocolError):
            control(0, other)


@pytest.mark.parametrize("tag", [0, 6])
def test_an_unknown_tag_is_refused(tag: int) -> None:
    data = bytearray(encode(NAME, Abort()))
    data[16:24] = tag.to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="tag"):
        control(0, data)


@pytest.mark.parametrize("place", range(4))
def test_gradients_with_a_negative_number_are_refused(place: int) -> None:
    data = bytearray(encode(NAME, Gradients(7, (), PROGRESS), 3))
    data[8 * place : 8 * place + 8] = (-2).to_bytes(8, "little", signed=True)
    with pytest.raises(ProtocolError, match="out of range"):
        decode(Kind.GRADIENTS, 9, 0, data)
    with pytest.raises(ProtocolError, match="tensors of no message"):
        decode(Kind.GRADIENTS, 9, 0, encode(NAME, Gradients(7, (), Progress([-2]))))


@pytest.mark.parametrize("words", [(-1,), (-2, -1)])
def test_a_part_of_a_message_that_has_no_tensor_is_refused(words: tuple[int, ...]) -> None:
    data = encode(NAME, Report(Progress([6, *words])))
    with pytest.raises(ProtocolError, match="no tensor"):
        control(0, data)


def test_tensors_behind_the_second_occurrence_of_a_message_are_refused() -> None:
    data = encode(NAME, Report(Progress([6, 6, -2])))
    with pytest.raises(ProtocolError, match="tensors of no message"):
        control(0, data)


@settings(max_examples=examples(50))
@given(names, numbers, numbers, st.none() | progresses, st.binary(max_size=9))
def test_the_head_of_gradients_survives(
    name: PassName, message_id: int, recorded_id: int, progress: Progress | None, payload: bytes
) -> None:
    message = Gradients(message_id, ["not part of it"], progress)
    data = encode(name, message, recorded_id, payload)
    # A missing progress and an empty one are encoded the same.
    expected = Gradients(message_id, (), progress or None)
    decoded = decode(Kind.GRADIENTS, 9, name.mode.flags, data + b"tensors")
    assert decoded == (name, expected, recorded_id, len(data) - len(payload), len(data))


def test_a_head_of_gradients_that_is_cut_is_refused() -> None:
    data = encode(NAME, Gradients(8, [], PROGRESS), 0, b"payload")
    decode(Kind.GRADIENTS, 9, 0, data)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(Kind.GRADIENTS, 9, 0, data[:size])
