"""Tests that both twins read the same from the bytes of an answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.thorough import examples
from tests.unit.rpc.results import VALUES, same
from torchweft.engine.codec.functions import resolve
from torchweft.engine.codec.tensors import decode_tensors, encode_tensors
from torchweft.engine.codec.values import decode, encode, refuse_home
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind, decode_reply, encode_reply
from torchweft.errors import ProtocolError
from torchweft.native import native, reason

LIMIT = 4
"""How many tensors a message may have in these tests."""


@pytest.fixture(scope="module")
def twin() -> Any:
    if native is None:
        pytest.skip(reason)
    return native


def message_of(value: object) -> tuple[bytes, int, int, list[Tensor]]:
    """Returns the message of an answer, where its payload begins and ends, and its tensors."""
    tensors: list[Tensor] = []
    payload = encode(value, tensors, True)
    assert payload is not None
    inlined = encode_tensors(tensors)
    assert inlined is not None
    control = encode_reply(0, 0, (), payload, inlined[0])
    *_, start, end = decode_reply(control)
    return control, start, end, tensors


def read_by(twin: Any, control: bytes, limit: int = LIMIT) -> Any:
    """Returns the value of an answer; NotImplemented if the twin leaves it to the plain one."""
    frame = Frame(Kind.REPLY, 0, 1, control, ())
    return twin.decode_answer(frame, (limit, resolve, refuse_home))


@settings(max_examples=examples(100))
@given(VALUES)
def test_both_twins_read_the_same_value(twin: Any, value: object) -> None:
    control, start, end, tensors = message_of(value)
    read = read_by(twin, control)
    if len(tensors) > LIMIT:
        assert read is NotImplemented
        return
    received, _ = decode_tensors(control, end)
    assert same(read, decode(control[start:end], received, (), resolve))
    assert same(read, value)


@pytest.mark.parametrize("tag", [15, 16])
def test_a_value_names_no_tensor_and_no_reference_that_the_message_lacks(
    twin: Any, tag: int
) -> None:
    payload = bytes([tag]) + (0).to_bytes(4, "little")
    assert read_by(twin, encode_reply(0, 0, (), payload)) is NotImplemented
    with pytest.raises(ProtocolError, match="malformed"):
        decode(payload, (), (), resolve)


def test_a_cut_message_is_left_to_the_plain_twin_wherever_it_ends(twin: Any) -> None:
    control, *_ = message_of((1, "text", torch.ones(3), math.pi))
    for size in range(len(control)):
        assert read_by(twin, control[:size]) is NotImplemented
