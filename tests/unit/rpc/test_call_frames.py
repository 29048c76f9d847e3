"""Both twins make the same frames of calls, and read the same heads of replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import torchweft.native as loading
from tests.unit.engine.codec.test_values import VALUES
from torchweft.engine.codec.objects import plain_frame
from torchweft.engine.codec.values import decode, no_home
from torchweft.engine.wire.frames import HEADER_BYTES
from torchweft.engine.wire.messages import (
    decode_call,
)

native = loading.native
pytestmark = pytest.mark.skipif(native is None, reason=loading.reason)
Tensors = list[torch.Tensor]


def kinds_of_tensors() -> list[torch.Tensor]:
    memory = torch.arange(12.0)
    return [
        torch.ones(2, 3),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        memory[:6],
        memory[::2],
        torch.ones(100_000),
        torch.empty(0),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
    ]


TENSORS = kinds_of_tensors()
HEADS = st.tuples(
    st.floats(allow_nan=False) | st.integers(0, 100),
    st.integers(-1, (1 << 63) - 1),
    st.binary(max_size=30),
    st.binary(max_size=2000),
)


def made(make: Callable[..., Any], *call: Any) -> tuple[Any, Tensors]:
    *front, by_name, inlines = call
    tensors: Tensors = []
    return make(*front, tensors, by_name, no_home, inlines), tensors


@given(
    HEADS,
    st.lists(VALUES | st.sampled_from(TENSORS), max_size=4).map(tuple),
    st.booleans(),
    st.booleans(),
)
def test_both_twins_make_the_same_frame(
    head: tuple[Any, ...], values: tuple[Any, ...], by_name: bool, inlines: bool
) -> None:
    assert native is not None
    found, tensors = made(native.encode_call, *head, values, by_name, inlines)
    wanted, all_tensors = made(plain_frame, *head, values, by_name, inlines)
    if found is None and wanted:
        # The plain twin also takes tensors that overlap, and lazily conjugated or negated ones.
        assert inlines
        assert len(tensors) > 1 or tensors[0].is_conj() or tensors[0].is_neg()
    else:
        assert found == wanted
    if wanted:
        assert [*map(id, tensors)] == [*map(id, all_tensors)]
        *front, (_, _, handed, start, end) = decode_call(wanted[0][HEADER_BYTES:])
        assert front == [*head]
        assert not handed
        payload = bytes(wanted[0][HEADER_BYTES:][start:end])
        assert len(decode(payload, tensors, ())) == len(values)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_tensors_are_not_read_in_the_modes_of_torch() -> None:
    assert native is not None
    both = (native.encode_call, plain_frame)
    call = 1.0, -1, b"m:f", b"", (torch.ones(2),), True, True
    simple = 1.0, -1, b"m:f", b"", (2,), True, True

    def frames(*call: Any) -> list[bool]:
        return [made(make, *call)[0] is not None for make in both]

    for mode in (FakeTensorMode(), TorchFunctionMode()):
        with mode:
            assert frames(*call) == [False, False]
            assert frames(*simple) == [True, True]
    seen: list[list[bool]] = []
    torch.func.vmap(lambda x: (seen.append(frames(*call)), x)[1])(torch.ones(2))
    torch.jit.trace(lambda x: (seen.append(frames(*call)), x + 1)[1], torch.ones(2))
    assert seen[:2] == [[False, False], [False, False]]
    assert frames(*call) == [True, True]


def test_an_error_of_the_program_arrives_as_it_is() -> None:
    assert native is not None

    def fail(_: object) -> None:
        raise RuntimeError("this program fails")

    for make in (native.encode_call, plain_frame):
        with pytest.raises(RuntimeError, match="this program fails"):
            make(1.0, -1, b"m:f", b"", (object(),), [], True, fail, True)
