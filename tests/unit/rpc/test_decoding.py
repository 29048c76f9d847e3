"""Tests that both twins read the same from the bytes of a message."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.thorough import examples
from tests.unit.rpc.results import VALUES, same
from torchweft.engine.codec.functions import resolve
from torchweft.engine.codec.tensors import decode_tensors, encode_tensors
from torchweft.engine.codec.values import decode, encode, refuse_home
from torchweft.engine.wire import messages
from torchweft.engine.wire.messages import NO_CREATION, NO_GRAD, HandedReference, encode_call
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId
from torchweft.native import native, reason

LIMIT = 4
"""How many tensors a message may have in these tests."""
HANDED = HandedReference(ReferenceId(1, 2, 3), 4)

sections = st.binary(max_size=20)
numbers = st.sampled_from([0, 1, 2**63 - 1, 2**63, NO_GRAD - 1, NO_GRAD])
calls = st.builds(
    encode_call,
    st.floats(),
    st.integers(NO_CREATION - 1, 2**63 - 1),
    numbers,
    numbers,
    *(sections, sections),
    st.sampled_from([(), (), (HANDED,)]),
    *(sections, sections),
)


@pytest.fixture(scope="module")
def twin() -> Any:
    if native is None:
        pytest.skip(reason)
    return native


def head_by(decode_call: Any, control: Any) -> Any:
    try:
        return decode_call(control)
    except ProtocolError as error:
        return str(error)


@settings(max_examples=examples(200))
@given(calls, st.integers(0, 60), st.binary(max_size=3), st.sampled_from([bytes, memoryview]))
def test_both_twins_read_or_refuse_the_same_heads_of_calls(
    twin: Any, control: bytes, place: int, damage: bytes, kind: Any
) -> None:
    damaged = control[:place] + damage + control[place + len(damage) :]
    for data in (control, damaged, control[:place], control[: len(control) - place]):
        assert head_by(twin.decode_call, kind(data)) == head_by(messages.decode_call, kind(data))


def message_of(value: object, front: bytes = b"") -> tuple[bytes, int, int, list[Tensor]]:
    """Returns a message, where its payload begins and ends, and its tensors."""
    tensors: list[Tensor] = []
    payload = encode(value, tensors, True)
    assert payload is not None
    inlined = encode_tensors(tensors)
    assert inlined is not None
    end = len(front) + len(payload)
    return front + payload + inlined[0], len(front), end, tensors


@settings(max_examples=examples(100))
@given(VALUES, sections, st.sampled_from([bytes, bytearray, memoryview]))
def test_both_twins_read_the_same_value(twin: Any, value: object, front: bytes, kind: Any) -> None:
    control, start, end, tensors = message_of(value, front)
    read = twin.decode_message(kind(control), start, end, LIMIT, resolve, refuse_home)
    if len(tensors) > LIMIT:
        assert read is NotImplemented
        return
    received, _ = decode_tensors(control, end)
    assert same(read, decode(control[start:end], received, (), resolve))
    assert same(read, value)


def test_a_message_without_a_payload_is_one_tensor_or_none(twin: Any) -> None:
    (content, _), tensor = encode_tensors([torch.ones(2)]) or (b"", False), torch.ones(2)
    front = b"head"
    start = len(front)
    assert same(twin.decode_message(front + content, start, start, 1, resolve, refuse_home), tensor)
    assert twin.decode_message(front, start, start, 1, resolve, refuse_home) is None


def test_tensors_that_need_a_closer_look_are_left_to_the_plain_twin(twin: Any) -> None:
    leaf, shared = torch.ones(2, requires_grad=True), torch.ones(4)
    for value in ((leaf,), (torch.nn.Parameter(torch.ones(1)),), (shared[:3], shared[1:])):
        control, start, end, _ = message_of(value)
        read = twin.decode_message(control, start, end, LIMIT, resolve, refuse_home)
        assert read is NotImplemented


@pytest.mark.parametrize("tag", [15, 16])
def test_a_value_names_no_tensor_and_no_reference_that_the_message_lacks(
    twin: Any, tag: int
) -> None:
    payload = bytes([tag]) + (0).to_bytes(4, "little")
    read = twin.decode_message(payload, 0, len(payload), LIMIT, resolve, refuse_home)
    assert read is NotImplemented
    with pytest.raises(ProtocolError, match="malformed"):
        decode(payload, (), (), resolve)


def test_a_cut_message_is_left_to_the_plain_twin_wherever_it_ends(twin: Any) -> None:
    control, start, end, _ = message_of((1, "text", torch.ones(3), math.pi))
    for size in range(start, len(control)):
        read = twin.decode_message(control[:size], start, end, LIMIT, resolve, refuse_home)
        assert read is NotImplemented
