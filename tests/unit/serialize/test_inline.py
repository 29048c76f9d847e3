"""Tests small tensors as bytes in their message; other tensors are left to tables."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tests.tables import cases
from tests.thorough import examples
from tests.unit.serialize.trips import random_tensor, raw
from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize import inline, table
from torchweft.serialize.table import (
    CODES,
    COMPUTED,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    STRIDED,
    UNION_FLOOR_BYTES,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("twin")]

OTHERS = {torch.complex64, torch.complex128, torch.bfloat16, torch.float8_e5m2}
DTYPES = sorted({*table.NUMPY_DTYPES, *OTHERS}, key=CODES.__getitem__)
HEAD_BYTES = 7


def encode(*tensors: Tensor) -> bytes | None:
    encoded = inline.encode(tensors)
    if encoded is None:
        return None
    data, requires_grad = encoded
    assert requires_grad == any(tensor.requires_grad for tensor in tensors)
    return data


def trip(*tensors: Tensor) -> list[Tensor]:
    data = encode(*tensors)
    assert data is not None
    return inline.decode(memoryview(b"head" + data), 4)[0]


def flags_of(*tensors: Tensor) -> list[int]:
    data = encode(*tensors)
    assert data is not None
    return list(inline.decode(data, 0)[1])


def check(arrived: Tensor, sent: Tensor) -> None:
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert raw(arrived) == raw(sent)
    assert not arrived.requires_grad
    assert type(arrived) is Tensor


# Round trips


@cases("dtype", DTYPES)
def test_each_dtype_and_shape_survives(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (1,), (3,), (2, 3), (1, 0, 2), (2, 1, 3), (1,) * 8, (0,) * 8]:
        tensor = random_tensor(dtype, shape, 1)
        (arrived,) = trip(tensor)
        check(arrived, tensor)
        assert arrived.is_contiguous(), shape
        assert arrived.untyped_storage().nbytes() == tensor.nbytes, shape


BASE = torch.arange(120.0).reshape(2, 3, 4, 5)
VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: BASE.transpose(0, 3),
    "permuted": lambda: BASE.permute(2, 0, 3, 1),
    "channels last": lambda: BASE.contiguous(memory_format=torch.channels_last),
    "strided": lambda: BASE[:, ::2, 1:, ::3],
    "expanded": lambda: torch.ones(1, 3, 1).expand(4, 3, 5),
    "expanded number": lambda: torch.tensor(2.5).expand(1000, 1000),
    "transposed and expanded": lambda: BASE[0].transpose(0, 2).unsqueeze(1).expand(-1, 7, -1, -1),
    "unfolded": lambda: torch.arange(10.0).unfold(0, 4, 1),
    "diagonal": lambda: torch.arange(16.0).reshape(4, 4).diagonal(),
    "column of a wide table": lambda: torch.arange(1 << 15).reshape(-1, 8)[:, 3],
    "bytes far apart": lambda: torch.arange(256, dtype=torch.uint8).repeat(64)[::100],
    "part": lambda: BASE[1, 1],
    "imaginary": lambda: torch.ones(3, dtype=torch.complex64).mul(2j).imag,
}


@cases("kind", VIEWS)
def test_views_survive_without_the_rest_of_their_storage(kind: str) -> None:
    view = VIEWS[kind]()
    (arrived,) = trip(view)
    check(arrived, view)
    at_most_bytes = max(2 * view.nbytes, UNION_FLOOR_BYTES)
    assert arrived.untyped_storage().nbytes() <= at_most_bytes


@pytest.mark.parametrize("kind", ["transposed", "permuted", "channels last", "expanded number"])
def test_strides_survive_where_the_view_fills_its_memory(kind: str) -> None:
    view = VIEWS[kind]()
    assert trip(view)[0].stride() == view.stride()


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Draws a view of a tensor by any shape, strides and offset that its storage allows."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    strides = draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 8))
    reach = 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, strides, strict=True))
    base = random_tensor(dtype, (offset + reach,), draw(st.integers(0, 99)))
    return base.as_strided(shape, strides, offset)


@settings(max_examples=examples(200))
@given(st.lists(views(), max_size=3))
def test_any_views_survive_and_own_their_memory(sent: list[Tensor]) -> None:
    data = encode(*sent)
    if data is None:  # Too large together, or two empty tensors: their storages look alike.
        assert len(sent) > 1
        return
    received, flags = inline.decode(data, 0)
    assert flags == b""
    assert len(received) == len(sent)
    for arrived, tensor in zip(received, sent, strict=True):
        check(arrived, tensor)
    addresses = [each.untyped_storage().data_ptr() for each in received if each.numel()]
    addresses += [each.untyped_storage().data_ptr() for each in sent if each.numel()]
    assert len(set(addresses)) == len(addresses)


def test_a_received_tensor_has_writable_memory_of_its_own() -> None:
    tensor = torch.arange(4)
    data = encode(tensor, torch.ones(2, 2), torch.zeros(6).view(2, 3).t())
    assert data is not None
    message = bytearray(data)
    first, second, third = inline.decode(message, 0)[0]
    again, *_ = inline.decode(message, 0)[0]
    for each in (first, second, third):
        each += 1
        assert each.untyped_storage().nbytes() == each.nbytes
    assert torch.equal(tensor, torch.arange(4))
    assert torch.equal(again, tensor)
    assert bytes(message) == data
    message += b"x"  # No view of the message is left.


def test_no_tensors_take_no_bytes() -> None:
    assert encode() == b""
    assert inline.decode(b"head", 4) == ([], b"")


# Flags


def computed(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True) * 2


@cases(
    ("make", "flags"),
    [
        (lambda: torch.ones(2, requires_grad=True), REQUIRES_GRAD),
        (lambda: computed(2, 3), REQUIRES_GRAD | COMPUTED),
        (lambda: computed(), REQUIRES_GRAD | COMPUTED),
        (lambda: computed(2, 3).t(), REQUIRES_GRAD | COMPUTED),
        (lambda: Parameter(torch.ones(2)), REQUIRES_GRAD | PARAMETER),
        (lambda: Parameter(torch.ones(2), requires_grad=False), PARAMETER),
        (lambda: Parameter(torch.ones(2, 3).t()), REQUIRES_GRAD | PARAMETER),
        (lambda: Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False), PARAMETER),
        (lambda: torch.empty(0, requires_grad=True), REQUIRES_GRAD),
        (lambda: torch.ones(2, dtype=torch.complex64, requires_grad=True), REQUIRES_GRAD),
    ],
)
def test_flags_are_told_and_tensors_come_without_grad(
    make: Callable[[], Tensor], flags: int
) -> None:
    tensor = make()
    assert flags_of(tensor) == [flags]
    assert flags_of(torch.ones(1), tensor, torch.ones(1)) == [0, flags, 0]
    (arrived,) = trip(tensor)
    check(arrived, tensor.detach())
    assert tensor.requires_grad == bool(flags & REQUIRES_GRAD)


def test_flags_name_their_tensors() -> None:
    plain, leaf, strided = torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2, 3).t()
    parameter = Parameter(torch.ones(1))
    assert flags_of(plain, strided) == []
    expected = [0, 0, REQUIRES_GRAD, 0, REQUIRES_GRAD | PARAMETER, 0]
    assert (
        flags_of(plain, strided, leaf, torch.ones(3, 2).t(), parameter, torch.ones(1)) == expected
    )


# Tensors that need tables


REFUSED: dict[str, Callable[[], list[Tensor]]] = {
    "half complex": lambda: [torch.ones(2, dtype=torch.complex32)],
    "sparse": lambda: [torch.eye(2).to_sparse()],
    "compressed": lambda: [torch.eye(2).to_sparse_csr()],
    "sparse beside views": lambda: [
        torch.ones(2, 3).t(),
        torch.eye(2).to_sparse(),
    ],
    "nested": lambda: [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])],
    "quantised": lambda: [torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.quint8)],
    "meta": lambda: [torch.ones(2, device="meta")],
    "conjugate": lambda: [torch.ones(2, dtype=torch.complex64).conj()],
    "negated": lambda: [torch._neg_view(torch.ones(2))],  # type: ignore[attr-defined]
    "conjugate that requires grad": lambda: [
        torch.ones(2, dtype=torch.complex64, requires_grad=True).conj()
    ],
    "lazy zero": lambda: [torch._efficientzerotensor(3)],  # type: ignore[attr-defined]
    "nine dimensions": lambda: [torch.ones((1,) * 9)],
    "one that is too large": lambda: [torch.zeros(inline.LIMIT_BYTES)],
    "too large together": lambda: [torch.zeros(inline.LIMIT_BYTES // 6) for _ in range(2)],
    "many that are too large": lambda: [
        torch.zeros(inline.FURTHER_BYTES * 4, dtype=torch.uint8) for _ in range(20)
    ],
    "too large with their heads": lambda: [
        torch.zeros(1, dtype=torch.uint8) for _ in range(inline.MESSAGE_LIMIT_BYTES // 16 + 1)
    ],
}

SHARING: dict[str, Callable[[], list[Tensor]]] = {
    "twice the same": lambda: [BASE[0].clone()] * 2,
    "a tensor and its transpose": lambda: [(base := BASE[0, 0].clone()), base.t()],
    "a tensor and its detached self": lambda: [(leaf := computed(3)), leaf.detach()],
    "overlapping halves": lambda: [(base := torch.arange(9.0))[:5], base[3:]],
    "bfloat16": lambda: [(base := torch.arange(6.0).bfloat16()), base[2:]],
    "beside conjugates": lambda: [
        (base := torch.arange(6.0).view(2, 3)).t(),
        (other := torch.ones(2, dtype=torch.complex64) * 1j),
        other.conj().resolve_conj(),
        base,
    ],
    "other dtypes": lambda: [(base := torch.arange(8)), base.view(torch.float32)[3:5]],
    "beside others": lambda: [
        torch.ones(2),
        (base := torch.arange(6.0).view(2, 3)).t(),
        torch.empty(0),
        base[1],
        torch.zeros(3, dtype=torch.int16),
    ],
}


@pytest.mark.parametrize("is_shared_somewhere", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_need_tables_are_refused(
    kind: str, is_shared_somewhere: bool, no_shared_ranges: None
) -> None:
    if is_shared_somewhere:
        inline.shared_ranges[1 << 60] = (1 << 60) + 1
    tensors = REFUSED[kind]()
    assert encode(*tensors) is None
    assert encode(torch.ones(1), *tensors) is None


@cases("kind", SHARING)
def test_overlapping_views_arrive_as_views_of_one_storage(kind: str) -> None:
    sent = SHARING[kind]()
    arrived = trip(*sent)
    for there, here in zip(arrived, sent, strict=True):
        check(there, here.detach())
        assert there.stride() == here.stride()
    pairs = list(itertools.combinations(range(len(sent)), 2))
    overlaps = [raw_overlap(sent[one], sent[other]) for one, other in pairs]
    assert any(overlaps)
    assert overlaps == [raw_overlap(arrived[one], arrived[other]) for one, other in pairs]


@cases("kind", SHARING)
def test_a_change_of_one_view_shows_in_the_others(kind: str) -> None:
    sent = [tensor.detach() for tensor in SHARING[kind]()]
    arrived = trip(*sent)
    for tensors in (sent, arrived):
        for tensor in tensors:
            if tensor.numel():
                tensor.view(-1)[0:1].zero_() if tensor.is_contiguous() else tensor[0].zero_()
    for there, here in zip(arrived, sent, strict=True):
        check(there, here)


def test_arrays_that_share_memory_are_views_of_one_storage_at_the_receiver() -> None:
    array = np.arange(12.0)
    arrived = trip(torch.from_numpy(array[:8]), torch.from_numpy(array[4:]))
    assert raw_overlap(*arrived)
    arrived[0][4] = 100
    assert arrived[1][0] == 100


def test_views_at_odd_addresses_of_each_other_go_by_a_table() -> None:
    content = torch.arange(64, dtype=torch.uint8)
    shifted = torch.frombuffer(content.numpy().data, dtype=torch.float32, count=4, offset=1)
    assert inline.encode([content[:8], shifted]) is None


def test_views_of_bytes_that_are_no_whole_number_of_elements_arrive() -> None:
    content = torch.arange(11, dtype=torch.uint8)
    sent = [content, content[:8].view(torch.float32), content[2:6].view(torch.int16)]
    arrived = trip(*sent)
    assert raw_overlap(arrived[0], arrived[1])
    for there, here in zip(arrived, sent, strict=True):
        check(there, here)
    content[3] = arrived[0][3] = 0xFF
    for there, here in zip(arrived, sent, strict=True):
        check(there, here)


def test_halves_of_one_storage_need_no_memory_in_common() -> None:
    halves = BASE[0].clone().chunk(2)
    arrived = trip(*halves)
    assert not raw_overlap(*arrived)
    for there, here in zip(arrived, halves, strict=True):
        check(there, here)


def raw_overlap(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


@pytest.fixture
def no_shared_ranges() -> Iterator[None]:
    before = dict(inline.shared_ranges)
    inline.shared_ranges.clear()
    yield
    inline.shared_ranges.clear()
    inline.shared_ranges.update(before)


def test_tensors_in_memory_that_a_program_shares_are_refused(no_shared_ranges: None) -> None:
    memory = torch.zeros(100)
    start = memory.data_ptr()
    inline.shared_ranges[start] = start + memory.nbytes
    for tensor in (memory, memory[5:6], memory.view(10, 10).t(), Parameter(memory[3:])):
        assert encode(tensor) is None
        assert encode(torch.ones(1), tensor) is None
    assert encode(torch.ones(1)) is not None
    inline.shared_ranges.clear()
    assert encode(memory) is not None


def test_a_large_tensor_is_not_copied_before_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = torch.zeros(inline.LIMIT_BYTES, 4)[:, ::2]
    copied: list[Tensor] = []
    monkeypatch.setattr(inline, "flatten", copied.append)
    assert encode(large) is None
    assert encode(large.t()) is None
    assert copied == []


def test_the_limit_counts_every_byte() -> None:
    most = inline.LIMIT_BYTES - HEAD_BYTES - 8
    data = encode(torch.zeros(most, dtype=torch.uint8))
    assert data is not None
    assert len(data) == inline.LIMIT_BYTES
    assert inline.decode(data, 0)[0][0].numel() == most
    assert encode(torch.zeros(most + 1, dtype=torch.uint8)) is None


def test_many_small_tensors_stand_in_their_message_beyond_the_limit_of_one() -> None:
    rows = list(torch.arange(100 * 1024.0).view(100, 1024))  # 400 KiB
    data = encode(*rows)
    assert data is not None
    arrived, _ = inline.decode(data, 0)
    assert all(map(torch.equal, arrived, rows))
    halves = [each for row in rows for each in (row[:600], row[400:])]  # Of one storage each.
    assert encode(*halves) is not None
    assert all(map(torch.equal, trip(*halves), halves))


def test_a_large_tensor_of_little_memory_stands_in_its_message() -> None:
    (arrived,) = trip(torch.ones(()).expand(1 << 20, 1 << 20))
    assert arrived.shape == (1 << 20, 1 << 20)
    assert arrived.untyped_storage().nbytes() == 4


# Malformed bytes


FLOAT, BOOL, INT = CODES[torch.float32], CODES[torch.bool], CODES[torch.int32]


def entry(
    code: int, flags: int, sizes: tuple[int, ...], memory: bytes, ndim: int = -1, size: int = -1
) -> bytes:
    ndim = len(sizes) // (2 if flags & STRIDED else 1) if ndim < 0 else ndim
    size = len(memory) if size < 0 else size
    return struct.pack(f"<BBBI{len(sizes)}Q", code, flags, ndim, size, *sizes) + memory


HUGE = 1 << 63
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
    "nine dimensions": entry(FLOAT, 0, (1,) * 9, bytes(4)),
    "255 dimensions": entry(FLOAT, 0, (1,) * 255, bytes(4)),
    "an unknown dtype": entry(250, 0, (1,), bytes(4)),
    "a dtype that only tables have": entry(CODES[torch.bits8], 0, (2,), bytes(2)),
    "a number of bfloat16 that is cut short": entry(CODES[torch.bfloat16], 0, (2,), bytes(3)),
    "an unknown flag": entry(FLOAT, 32, (1,), bytes(4)),
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
            inline.decode(data, 0)


def test_more_bytes_than_are_ever_sent_this_way_are_refused_unread() -> None:
    one = entry(BOOL, 0, (0,), b"")
    many = one * (inline.MESSAGE_LIMIT_BYTES // len(one))
    assert len(inline.decode(b"head" + many, 4)[0]) == inline.MESSAGE_LIMIT_BYTES // len(one)
    with pytest.raises(ProtocolError, match="bytes"):
        inline.decode(b"head" + many + one, 4)


def lies_inside(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in pairs)
    return end * tensor.element_size() <= tensor.untyped_storage().nbytes()


def decode_anything(data: bytes) -> None:
    try:
        tensors, flags = inline.decode(data, 0)
    except (ProtocolError, SerializationError):
        return
    assert len(flags) in (0, len(tensors))
    taken = sum(each.untyped_storage().nbytes() for each in tensors)
    assert taken <= len(data)
    for tensor in tensors:
        assert lies_inside(tensor), (tensor.shape, tensor.stride())
    for tensor, flag in zip(tensors, flags, strict=False):
        assert not flag & ~(REQUIRES_GRAD | PARAMETER | COMPUTED)
        assert not flag & REQUIRES_GRAD or tensor.is_floating_point() or tensor.is_complex()


@settings(max_examples=examples(500))
@given(st.binary(max_size=60))
def test_any_bytes_are_tensors_inside_of_them_or_a_typed_error(data: bytes) -> None:
    decode_anything(data)


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


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_tensors_are_tensors_or_a_typed_error(data: st.DataObject) -> None:
    whole = encode(
        torch.ones(2, 3), BASE[0, 0].t(), computed(2, 2), Parameter(torch.ones(1)), torch.tensor(1)
    )
    assert whole is not None
    damaged = bytearray(whole)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged[place] = data.draw(st.integers(0, 255))
    for sent in (damaged, whole[:place], whole + bytes(damaged[:1])):
        decode_anything(bytes(sent))


@pytest.mark.parametrize("flags", [0, PARAMETER, STRIDED])
def test_every_number_of_a_dtype_is_read_or_a_typed_error(flags: int) -> None:
    for code in range(len(table._DTYPE_NAMES) + 2):
        for size_bytes in (0, 16, 32):
            count = size_bytes // 16
            decode_anything(entry(code, flags, (count, 1)[: 2 if flags else 1], bytes(size_bytes)))


@pytest.mark.parametrize("flags", [0, STRIDED, REQUIRES_GRAD])
def test_a_dtype_that_only_other_workers_have_is_named(
    monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    code = CODES[torch.float8_e5m2]
    monkeypatch.setattr(table, "_DTYPES", (*table._DTYPES[:code], None, *table._DTYPES[code + 1 :]))
    monkeypatch.delitem(inline._TORCH, code)
    monkeypatch.setattr(inline, "native", None)  # It has no number of a dtype that torch lacks.
    sizes = (1, 1) if flags & STRIDED else (1,)
    with pytest.raises(SerializationError, match="float8_e5m2"):
        inline.decode(entry(code, flags, sizes, bytes(1)), 0)


def test_an_empty_tensor_with_a_dimension_beyond_the_limit_of_numpy_goes_by_a_table() -> None:
    row = torch.arange(12.0).reshape(4, 3)
    assert inline.encode([row.T, torch.empty(1 << 62, 0), row[1:]]) is None


@pytest.mark.parametrize("beside", [[], [torch.ones(4, 4).t()], [torch.ones(4)[:3]] * 2])
def test_tensors_of_other_devices_are_left_to_tables_before_anything_is_copied(
    monkeypatch: pytest.MonkeyPatch, beside: list[Tensor]
) -> None:
    def copy(*_: object) -> None:
        raise AssertionError("memory was copied")

    monkeypatch.setattr(inline, "string_at", copy)
    monkeypatch.setattr(inline, "flatten", copy)
    elsewhere = torch.ones(4, 4, device="meta").t()
    assert inline.encode([elsewhere, *beside]) is None
    assert inline.encode([*beside, elsewhere]) is None
