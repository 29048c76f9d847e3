"""Tests descriptions of tensors from others, and which tensors stand in a message."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tests.tables import cases
from tests.thorough import examples
from torchweft.engine.codec import tensors as codec
from torchweft.engine.codec import tensors as dtypes
from torchweft.engine.codec.tensors import (
    APART,
    CODES,
    COMPUTED,
    ON_DEVICE,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    STRIDED,
    decode_tensors,
    describe,
    encode_tensors,
    read,
    with_flags,
)
from torchweft.errors import ProtocolError, SerializationError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("twin")]

HEAD_BYTES = 7
KIB = 1024


def encoded(tensors: Sequence[Tensor]) -> bytes:
    made = encode_tensors(tensors)
    assert made is not None
    return made[0]


# Tensors that stand in no message


REFUSED: dict[str, Callable[[], list[Tensor]]] = {
    "sparse": lambda: [torch.eye(2).to_sparse()],
    "compressed": lambda: [torch.eye(2).to_sparse_csr()],
    "sparse beside views": lambda: [torch.ones(2, 3).t(), torch.eye(2).to_sparse()],
    "nested": lambda: [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])],
    "quantised": lambda: [torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.quint8)],
    "meta": lambda: [torch.ones(2, device="meta")],
    "one that is too large": lambda: [torch.zeros(codec.LIMIT_BYTES)],
    "too large together": lambda: [torch.zeros(codec.LIMIT_BYTES // 6) for _ in range(2)],
    "many that are too large": lambda: [
        torch.zeros(codec.FURTHER_BYTES * 4, dtype=torch.uint8) for _ in range(20)
    ],
    "too large with their heads": lambda: [
        torch.zeros(KIB, dtype=torch.uint8) for _ in range(codec.MESSAGE_LIMIT_BYTES // KIB - 1)
    ],
}


@pytest.fixture
def no_shared_ranges() -> Iterator[None]:
    before = dict(codec.shared_ranges)
    codec.shared_ranges.clear()
    yield
    codec.shared_ranges.clear()
    codec.shared_ranges.update(before)


def test_lazy_tensors_arrive_as_the_program_sees_them() -> None:
    lazy: list[Tensor] = [
        torch.full((2,), 1j, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2)),  # type: ignore[attr-defined]
        torch.full((2,), 1j, dtype=torch.complex64, requires_grad=True).conj(),
        torch._efficientzerotensor(3),  # type: ignore[attr-defined]
    ]
    encoded = encode_tensors(lazy)
    assert encoded is not None
    arrived = with_flags(*decode_tensors(encoded[0], 0))
    assert [each.tolist() for each in arrived] == [[-1j] * 2, [-1] * 2, [-1j] * 2, [0] * 3]
    assert [each.requires_grad for each in arrived] == [False, False, True, False]


@pytest.mark.usefixtures("no_shared_ranges")
@pytest.mark.parametrize("is_shared_somewhere", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_need_buffers_are_refused(kind: str, is_shared_somewhere: bool) -> None:
    if is_shared_somewhere:
        codec.shared_ranges[1 << 60] = (1 << 60) + 1
    tensors = REFUSED[kind]()
    assert encode_tensors(tensors) is None
    assert encode_tensors([torch.ones(1), *tensors]) is None


@pytest.mark.usefixtures("no_shared_ranges")
def test_tensors_in_memory_that_a_program_shares_are_refused() -> None:
    memory = torch.zeros(100)
    start = memory.data_ptr()
    codec.shared_ranges[start] = start + memory.nbytes
    for tensor in (memory, memory[5:6], memory.view(10, 10).t(), Parameter(memory[3:])):
        assert encode_tensors([tensor]) is None
        assert encode_tensors([torch.ones(1), tensor]) is None
    assert encode_tensors([torch.ones(1)]) is not None
    codec.shared_ranges.clear()
    assert encode_tensors([memory]) is not None


def test_the_limit_counts_every_byte() -> None:
    most = codec.LIMIT_BYTES - HEAD_BYTES - 8
    data = encoded([torch.zeros(most, dtype=torch.uint8)])
    assert len(data) == codec.LIMIT_BYTES
    assert decode_tensors(data, 0)[0][0].numel() == most
    assert encode_tensors([torch.zeros(most + 1, dtype=torch.uint8)]) is None


# Malformed bytes


FLOAT, BOOL, INT = CODES[torch.float32], CODES[torch.bool], CODES[torch.int32]


def entry(
    code: int, flags: int, sizes: tuple[int, ...], memory: bytes, ndim: int = -1, size: int = -1
) -> bytes:
    ndim = len(sizes) // (2 if flags & STRIDED else 1) if ndim < 0 else ndim
    size = len(memory) if size < 0 else size
    return struct.pack(f"<BBBI{len(sizes)}Q", code, flags, ndim, size, *sizes) + memory


HUGE = 1 << 63
VIEW = STRIDED | SHARED
MALFORMED = {
    "cut in its head": b"\7\0\1\4",
    "cut in its sizes": entry(FLOAT, 0, (1,), b"", ndim=2, size=4),
    "cut in its strides": entry(FLOAT, STRIDED, (1, 1, 1), b"", ndim=2, size=4),
    "cut in its memory": entry(FLOAT, 0, (1,), b"123", size=4),
    "cut in its memory of more dimensions": entry(FLOAT, 0, (1, 1), b"123", size=4),
    "without memory": entry(FLOAT, 0, (1,), b"", size=4),
    "more memory than its shape": entry(FLOAT, 0, (1,), bytes(8)),
    "more memory than its dimensions": entry(FLOAT, 0, (1, 1), bytes(8)),
    "less memory than its shape": entry(FLOAT, 0, (3,), bytes(8)),
    "less memory than its dimensions": entry(FLOAT, 0, (3, 1), bytes(8)),
    "a number without memory": entry(FLOAT, 0, (), b""),
    "part of an element": entry(FLOAT, 0, (1,), bytes(5)),
    "memory of an empty tensor": entry(FLOAT, 0, (0,), bytes(4)),
    "an unknown dtype": entry(250, 0, (1,), bytes(4)),
    "a number of bfloat16 that is cut short": entry(CODES[torch.bfloat16], 0, (2,), bytes(3)),
    "an unknown flag": entry(FLOAT, 128, (1,), bytes(4)),
    "memory apart": entry(FLOAT, APART, (1,), b""),
    "a device": entry(FLOAT, ON_DEVICE, (1, 255), bytes(4), ndim=1),
    "an empty tensor with strides": entry(FLOAT, STRIDED, (0, 1), b""),
    "a view of a later tensor": entry(FLOAT, VIEW, (1, 1, 0, 9), b"", ndim=1),
    "a view of a tensor that shares nothing": entry(FLOAT, VIEW, (1, 1, 0, 0), b"", ndim=1),
    "a view that leaves its own memory": entry(FLOAT, VIEW, (2, 1, 0, 0), bytes(4), ndim=1),
    "a view with an offset beyond its memory": entry(FLOAT, VIEW, (1, 1, 1, 0), bytes(4), ndim=1),
    "shared memory": entry(FLOAT, SHARED, (1,), bytes(4)),
    "an integer that requires grad": entry(INT, REQUIRES_GRAD, (1,), bytes(4)),
    "an integer parameter that requires grad": entry(
        INT, REQUIRES_GRAD | PARAMETER, (1,), bytes(4)
    ),
    "a computed integer": entry(INT, COMPUTED, (1,), bytes(4)),
    "a computed tensor that requires no grad": entry(FLOAT, COMPUTED, (1,), bytes(4)),
    "a computed parameter that requires no grad": entry(
        FLOAT, COMPUTED | PARAMETER, (1,), bytes(4)
    ),
    "strides beyond its memory": entry(FLOAT, STRIDED, (2, 5), bytes(8)),
    "strides short of its memory": entry(FLOAT, STRIDED, (2, 1), bytes(12)),
    "strides that overflow": entry(FLOAT, STRIDED, (2, HUGE - 1), bytes(4)),
    "strides that overflow to little": entry(FLOAT, STRIDED, (5, HUGE), bytes(4)),
    "a stride that is negative": entry(FLOAT, STRIDED, (2, (1 << 64) - 1), bytes(4)),
    "a size that is negative": entry(FLOAT, STRIDED, ((1 << 64) - 1, 0), bytes(4)),
    "sizes that overflow": entry(FLOAT, 0, (1 << 40, 1 << 40), bytes(4)),
    "sizes that overflow to nothing": entry(FLOAT, 0, (1 << 32, 1 << 32), b""),
    "sizes that overflow by their bytes": entry(FLOAT, 0, (1 << 62,), b""),
    "strided sizes that overflow": entry(FLOAT, STRIDED, (1 << 40, 1 << 40, 0, 0), bytes(4)),
    "an empty shape of impossible sizes": entry(FLOAT, 0, (0, 1 << 62, 1 << 62), b""),
    "an empty shape of sizes no tensor has": entry(FLOAT, 0, (0, HUGE), b""),
    "flags, and too little memory": entry(FLOAT, REQUIRES_GRAD, (2,), bytes(4)),
    "flags, and memory cut short": entry(FLOAT, REQUIRES_GRAD, (2,), bytes(4), size=8),
}


@cases("kind", MALFORMED)
def test_malformed_bytes_are_a_protocol_error(kind: str) -> None:
    good = entry(FLOAT, 0, (1,), bytes(4))
    for data in (MALFORMED[kind], good + MALFORMED[kind], bytearray(MALFORMED[kind])):
        with pytest.raises(ProtocolError):
            decode_tensors(data, 0)


def test_more_bytes_than_are_ever_sent_this_way_are_refused_unread() -> None:
    one = entry(BOOL, 0, (1000,), bytes(1000))
    many = one * (codec.MESSAGE_LIMIT_BYTES // len(one))
    assert len(decode_tensors(b"head" + many, 4)[0]) == codec.MESSAGE_LIMIT_BYTES // len(one)
    with pytest.raises(ProtocolError, match="bytes"):
        decode_tensors(b"head" + many + one, 4)


def lies_inside(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in pairs)
    return end * tensor.element_size() <= tensor.untyped_storage().nbytes()


def decode_anything(data: bytes) -> None:
    try:
        tensors, flags = decode_tensors(data, 0)
    except (ProtocolError, SerializationError):
        return
    assert len(flags) in (0, len(tensors))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    assert sum(storage.nbytes() for storage in storages.values()) <= len(data)
    for tensor in tensors:
        assert lies_inside(tensor), (tensor.shape, tensor.stride())
    for tensor, flag in zip(tensors, flags, strict=False):
        assert not flag & ~(REQUIRES_GRAD | PARAMETER | COMPUTED | SHARED)
        assert not flag & REQUIRES_GRAD or tensor.is_floating_point() or tensor.is_complex()


@settings(max_examples=examples(500))
@given(
    st.integers(0, 16),
    st.sampled_from([0, 1, 2, 3, STRIDED, STRIDED | 1, STRIDED | 17]),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 1 << 31, 1 << 32, 1 << 62, HUGE]), max_size=6),
    st.integers(0, 40),
)
def test_any_sizes_and_strides_stay_inside_of_the_bytes(
    code: int, flags: int, sizes: list[int], size_bytes: int
) -> None:
    if flags & STRIDED and len(sizes) % 2:
        sizes.pop()
    decode_anything(entry(code, flags, tuple(sizes), bytes(size_bytes)))


@pytest.mark.parametrize("flags", [0, PARAMETER, STRIDED])
def test_every_number_of_a_dtype_is_read_or_a_typed_error(flags: int) -> None:
    for code in range(len(dtypes._DTYPE_NAMES) + 2):
        for size_bytes in (0, 16, 32):
            count = size_bytes // 16
            decode_anything(entry(code, flags, (count, 1)[: 2 if flags else 1], bytes(size_bytes)))


# Descriptions of memory that is apart


STEPS = torch.ones(6)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(1) for _ in range(4)],
        [torch.empty(0) for _ in range(4)],
        list(torch.ones(4).unbind()),
        [STEPS] * 4,
    ],
)
def test_more_tensors_than_the_limit_are_refused(tensors: list[Tensor]) -> None:
    table, _ = describe(tensors)
    assert len(read(table, limit=4)) == 4
    with pytest.raises(SerializationError, match="'ps' accepts at most 3; stack some of them"):
        read(table, limit=3, worker="ps")
