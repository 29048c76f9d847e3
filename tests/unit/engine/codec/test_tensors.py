"""Tests round trips of tensors, with their memory in the message and with buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tests.tables import cases
from tests.thorough import examples
from tests.unit.engine.codec.trips import copies, random_tensor, raw
from torchweft.engine.codec import tensors as codec
from torchweft.engine.codec.tensors import (
    CODES,
    COMPUTED,
    PARAMETER,
    REQUIRES_GRAD,
    UNION_FLOOR_BYTES,
    as_memory,
    decode_tensors,
    describe,
    encode_tensors,
    read,
    rebuild,
    with_flags,
)
from torchweft.errors import SerializationError
from torchweft.native import native, reason

pytestmark = pytest.mark.filterwarnings("ignore:.* support is experimental")

ALL_DTYPES = sorted(CODES, key=CODES.__getitem__)

Trip = Callable[[Sequence[Tensor]], tuple[list[Tensor], bytes]]
"""Sends tensors; returns them as they arrive, and their flags."""


def in_message(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bytes]:
    encoded = encode_tensors(tensors)
    assert encoded is not None
    data, requires_grad = encoded
    assert requires_grad == any(tensor.requires_grad for tensor in tensors)
    return decode_tensors(memoryview(b"head" + data), 4)


def apart(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bytes]:
    table, buffers = describe(tensors)
    return rebuild(read(table), copies(buffers))


@pytest.fixture(scope="module", params=["native", "plain", "apart"])
def trip(request: pytest.FixtureRequest) -> Iterator[Trip]:
    """Sends tensors in their message, by either twin, and with their memory apart."""
    if request.param == "native" and native is None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "native", native if request.param == "native" else None)
        yield apart if request.param == "apart" else in_message


def check(arrived: Tensor, sent: Tensor) -> None:
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert raw(arrived) == raw(sent)
    assert not arrived.requires_grad
    assert type(arrived) is Tensor


def check_all(arrived: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
    for there, here in zip(arrived, sent, strict=True):
        check(there, here)


# One tensor


BASE = torch.arange(120.0).reshape(2, 3, 4, 5)
VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: BASE.transpose(0, 3),
    "permuted": lambda: BASE.permute(2, 0, 3, 1),
    "channels last": lambda: BASE.contiguous(memory_format=torch.channels_last),
    "channels last in 3D": lambda: torch.randn(1, 2, 3, 4, 5).to(
        memory_format=torch.channels_last_3d
    ),
    "expanded number": lambda: torch.tensor(2.5).expand(1000, 1000),
    "expanded row": lambda: torch.tensor([1.0, 2.0]).expand(3, 2),
    "unfolded": lambda: torch.arange(10.0).unfold(0, 4, 1),
    "narrow": lambda: torch.arange(25.0).view(5, 5).narrow(1, 2, 2),
    "strided": lambda: BASE[:, ::2, 1:, ::3],
    "expanded": lambda: torch.ones(1, 3, 1).expand(4, 3, 5),
    "transposed and expanded": lambda: BASE[0].transpose(0, 2).unsqueeze(1).expand(-1, 7, -1, -1),
    "diagonal": lambda: torch.arange(16.0).reshape(4, 4).diagonal(),
    "column of a wide table": lambda: torch.arange(1 << 15).reshape(-1, 8)[:, 3],
    "bytes far apart": lambda: torch.arange(256, dtype=torch.uint8).repeat(64)[::100],
    "part": lambda: BASE[1, 1],
    "imaginary": lambda: torch.ones(3, dtype=torch.complex64).mul(2j).imag,
    "many dimensions": lambda: torch.arange(4.0).view(2, *[1] * 20, 2),
    "empty and wide": lambda: torch.empty(1 << 62, 0),
    "an expanded slice": lambda: torch.arange(3000.0).view(3, 1000)[:, :1].expand(3, 7),
    "a row of a large matrix": lambda: torch.arange(1_000_000.0).view(1000, 1000)[5],
    "a column of a large matrix": lambda: torch.arange(1_000_000.0).view(1000, 1000)[:, 0],
    "rows far apart": lambda: torch.arange(1_000_000.0).view(1000, 1000)[::500],
}


@cases("kind", VIEWS)
def test_views_survive_without_the_rest_of_their_storage(trip: Trip, kind: str) -> None:
    view = VIEWS[kind]()
    ((arrived,), _) = trip([view])
    check(arrived, view)
    at_most_bytes = max(2 * view.nbytes, UNION_FLOOR_BYTES)
    assert arrived.untyped_storage().nbytes() <= at_most_bytes


@st.composite
def placed(draw: st.DrawFn) -> Tensor:
    """Draws a view of a tensor by any shape, strides and offset that its storage allows."""
    dtype = draw(st.sampled_from(ALL_DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    strides = draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 8))
    reach = 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, strides, strict=True))
    base = random_tensor(dtype, (offset + reach,), draw(st.integers(0, 99)))
    return base.as_strided(shape, strides, offset)


@settings(max_examples=examples(200))
@given(st.lists(placed(), max_size=3))
def test_any_views_survive_and_own_their_memory(trip: Trip, sent: list[Tensor]) -> None:
    received, flags = trip(sent)
    assert flags == b""
    check_all(received, sent)
    addresses = [each.untyped_storage().data_ptr() for each in received if each.numel()]
    addresses += [each.untyped_storage().data_ptr() for each in sent if each.numel()]
    assert len(set(addresses)) == len(addresses)


# Flags


def computed(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True) * 2


@cases(
    ("make", "flags"),
    [
        (lambda: torch.ones(2), 0),
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
    trip: Trip, make: Callable[[], Tensor], flags: int
) -> None:
    tensor = make()
    (arrived,), told = trip([tensor])
    check(arrived, tensor.detach())
    assert told == (bytes([flags]) if flags else b"")
    others = [torch.ones(1), tensor, torch.ones(1)]
    assert trip(others)[1] == (bytes([0, flags, 0]) if flags else b"")
    assert tensor.requires_grad == bool(flags & REQUIRES_GRAD)
    (made,) = with_flags([arrived], told)
    assert type(made) is type(tensor)
    assert made.requires_grad == tensor.requires_grad
    assert made.is_leaf


# Tensors that share memory


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
    "no whole number of elements": lambda: [
        (base := torch.arange(11, dtype=torch.uint8)),
        base[:8].view(torch.float32),
        base[2:6].view(torch.int16),
    ],
    "behind the begin of their storage": lambda: [
        (base := torch.arange(64, dtype=torch.uint8))[17:],
        base[20:].view(torch.float32),
        base[32:48].view(torch.complex128),
    ],
    "a number twice": lambda: [torch.tensor(1.5)] * 2,
    "beside others": lambda: [
        torch.ones(2),
        (base := torch.arange(6.0).view(2, 3)).t(),
        torch.empty(0),
        base[1],
        torch.zeros(3, dtype=torch.int16),
    ],
    "equal columns of a large matrix": lambda: [
        (base := torch.arange(1_000_000.0).view(1000, 1000))[:, 0],
        base[:, -1],
        base[:, 0],
    ],
}


@cases("kind", SHARING)
def test_a_change_of_one_view_shows_in_the_others(trip: Trip, kind: str) -> None:
    sent = [tensor.detach() for tensor in SHARING[kind]()]
    arrived, _ = trip(sent)
    for tensors in (sent, arrived):
        for tensor in tensors:
            if tensor.numel():
                tensor.view(-1)[0:1].zero_() if tensor.is_contiguous() else tensor[0].zero_()
    check_all(arrived, sent)


@st.composite
def views(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """Draws a view of ``tensor``, made by up to three operations."""
    for _ in range(draw(st.integers(0, 3))):
        dimension = draw(st.integers(0, tensor.dim() - 1)) if tensor.dim() else 0
        size = tensor.shape[dimension] if tensor.dim() else 0
        operation = draw(st.sampled_from(["swap", "slice", "select", "expand", "unfold", "new"]))
        if operation == "new":
            tensor = tensor.unsqueeze(0)
        elif not tensor.dim():
            continue
        elif operation == "swap":
            tensor = tensor.transpose(dimension, draw(st.integers(0, tensor.dim() - 1)))
        elif operation == "slice":
            start = draw(st.integers(0, size))
            places = [slice(None)] * dimension + [slice(start, None, draw(st.integers(1, 3)))]
            tensor = tensor[tuple(places)]
        elif operation == "select" and size:
            tensor = tensor.select(dimension, draw(st.integers(0, size - 1)))
        elif operation == "expand" and size == 1:
            tensor = tensor.expand(*(-1 if d != dimension else 4 for d in range(tensor.dim())))
        elif operation == "unfold" and size > 1:
            tensor = tensor.unfold(dimension, 2, 1)
    return tensor


@settings(max_examples=examples(60))
@given(st.data(), st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(2, 4))
def test_views_of_one_storage_go_on_sharing_it(
    trip: Trip, data: st.DataObject, shape: tuple[int, ...], count: int
) -> None:
    base = random_tensor(torch.int32, shape, 0)
    assert base.nbytes < UNION_FLOOR_BYTES
    originals = [data.draw(views(base)) for _ in range(count)]
    arrived, _ = trip(originals)
    written = data.draw(st.integers(0, count - 1))
    for tensors in (originals, arrived):
        # Through as_strided, because torch refuses writes to an expanded or unfolded view.
        target = tensors[written]
        if target.numel():
            target.as_strided((1,), (1,), target.storage_offset()).fill_(77)
    check_all(arrived, originals)


# Buffers


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(3)],
        [torch.ones(2, 2).t(), torch.ones(1)],
        [(base := torch.arange(8.0))[:6], base[2:]],
    ],
)
def test_buffers_may_be_read_only_misaligned_too_long_or_tensors(tensors: list[Tensor]) -> None:
    table, buffers = describe(tensors)
    shifted = [memoryview(bytearray(b"x" + as_memory(buffer)))[1:] for buffer in buffers]
    longer = [bytearray(as_memory(buffer)) + b"rest" for buffer in buffers]
    read_only = [bytes(memory) for memory in copies(buffers)]
    flat = [torch.frombuffer(memory, dtype=torch.uint8) for memory in copies(buffers)]
    part = [
        torch.frombuffer(bytearray(b"xyz") + memory, dtype=torch.uint8)[3:]
        for memory in copies(buffers)
    ]
    for arrived in (shifted, longer, read_only, flat, part):
        rebuilt, _ = rebuild(read(table), arrived)
        check_all(rebuilt, tensors)
        rebuilt[0].add_(1)
        assert raw(rebuilt[0]) != raw(tensors[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantised"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_plain_memory_is_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(SerializationError, match="memory"):
        describe([make()])


@pytest.mark.parametrize("start", [0, 3])
def test_a_tensor_whose_memory_was_freed_is_refused(start: int) -> None:
    base = torch.arange(10.0)
    tensor = base[start:]
    base.untyped_storage().resize_(0)
    assert encode_tensors([tensor]) is None
    with pytest.raises(SerializationError, match="freed"):
        describe([tensor])
    with pytest.raises(SerializationError, match="freed"):
        describe([torch.ones(2), tensor, torch.ones(2).expand(3, 2)])


def test_memory_of_a_device_that_was_freed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with pytest.raises(SerializationError, match="has been freed"):
        describe([freed])


def test_a_tensor_within_a_transform_of_torch_func_is_refused() -> None:
    def send(tensor: Tensor) -> Tensor:
        assert encode_tensors([tensor]) is None
        describe([tensor])
        return tensor.sum()

    functionalized = torch.func.functionalize(send)
    for transform in (torch.func.vmap(send), torch.func.grad(send), functionalized):
        with pytest.raises(SerializationError, match=r"torch\.func.*in the remote function"):
            transform(torch.ones(2))


# Devices


def test_a_missing_device_names_the_device_the_worker_and_the_fix() -> None:
    table, buffers = describe([torch.ones(2)] * 2, lambda _: torch.device("cuda:97"))
    with pytest.raises(SerializationError) as caught:
        rebuild(read(table), copies(buffers), "trainer3")
    text = str(caught.value)
    assert all(part in text for part in ("tensor 0", "cuda:97", "'trainer3'", ".cpu()"))
    assert caught.value.worker == "trainer3"


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_on_a_device_are_put_there(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    # The CPU under another name, to test the round trip.
    monkeypatch.setattr(codec, "device_of", lambda code, index, worker: torch.device("cpu", 0))
    base = torch.arange(12.0).view(3, 4)
    tensors = [base.t(), base[1] if shared else torch.ones(4), torch.ones(0)]
    table, buffers = describe(tensors, lambda _: torch.device("cuda:0"))
    rebuilt, _ = rebuild(read(table), copies(buffers))
    check_all(rebuilt, tensors)
    rebuilt[0].zero_()
    assert rebuilt[1].any() != shared
