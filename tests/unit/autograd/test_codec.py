from __future__ import annotations

import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.autograd.codec import decode, encode
from weft.errors import ProtocolError
from weft.protocol.backward import (
    Abort,
    Discover,
    Done,
    Failed,
    Gradients,
    Message,
    PassKey,
    Reached,
    Run,
    Started,
)
from weft.wire.messages import encode_ints

numbers = st.integers(-(2**63), 2**63 - 1)
keys = st.builds(PassKey, numbers, numbers)
ids = st.lists(numbers, max_size=3).map(tuple)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Discover, keys, numbers, ids),
    st.builds(Reached, keys, numbers, st.dictionaries(numbers, ids, max_size=3)),
    st.builds(Run, keys, st.booleans(), st.booleans()),
    st.builds(Started, keys, ids),
    st.builds(Done, keys),
    st.builds(Failed, keys, numbers, st.text(max_size=5), st.binary(max_size=5)),
    st.builds(Abort, keys),
)
KEY = PassKey(1, 2)
ONE_OF_EACH: list[Message] = [
    Discover(KEY, 3, (4, 5)),
    Reached(KEY, 3, {4: (5, 6), 7: ()}),
    Run(KEY, True, False),
    Started(KEY, (4, 5)),
    Done(KEY),
    Failed(KEY, 3, "matmul über alles", b"\x00error"),
    Abort(KEY),
]


def test_every_message_but_that_with_tensors_is_tried() -> None:
    assert {type(message) for message in ONE_OF_EACH} == set(typing.get_args(Message)) - {Gradients}


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_survives(message: Message) -> None:
    data = encode(message)
    assert decode(data) == message
    assert decode(memoryview(data)) == message
    assert type(decode(data)) is type(message)


@settings(max_examples=50)
@given(messages)
def test_any_message_survives(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_that_is_cut_is_refused_or_another(message: Message) -> None:
    data = encode(message)
    for size in range(len(data)):
        try:
            shorter = decode(data[:size])
        except ProtocolError:
            continue
        assert encode(shorter) == data[:size], "something was made up"


@settings(max_examples=80)
@given(
    st.binary(max_size=80)
    | st.lists(st.integers(-2, 9), max_size=9).map(lambda fields: encode_ints(*fields))
)
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message) in typing.get_args(Message)
