from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from tests.tables import cases
from tests.thorough import examples
from tests.unit.serialize.trips import copies, object_trip, random_tensor, raw, tensor_trip
from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize import inline
from torchweft.serialize import tensors as tensors_module
from torchweft.serialize.table import (
    CODES,
    COMPUTED,
    HEADER,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    SOME_COMPUTED,
    SOME_GRAD,
    UNION_FLOOR_BYTES,
    device_code,
)
from torchweft.serialize.tensors import as_memory, describe, grad_flags, rebuild

pytestmark = pytest.mark.filterwarnings("ignore:.* support is experimental")

ALL_DTYPES = sorted(CODES, key=CODES.__getitem__)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


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


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@cases("dtype", ALL_DTYPES)
def test_each_dtype_and_shape_survives(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3,), (2, 3), (1, 0, 2), (2, 1, 1, 2)]:
        tensor = random_tensor(dtype, shape, 1)
        (rebuilt,) = tensor_trip(tensor)
        assert same(rebuilt, tensor), shape
        assert rebuilt.is_contiguous(), shape


@settings(max_examples=examples(60))
@given(st.data(), st.sampled_from(ALL_DTYPES), shapes, st.integers(0, 99))
def test_any_view_survives(
    data: st.DataObject, dtype: torch.dtype, shape: tuple[int, ...], seed: int
) -> None:
    view = data.draw(views(random_tensor(dtype, shape, seed)))
    (rebuilt,) = tensor_trip(view)
    assert same(rebuilt, view)


@settings(max_examples=examples(60))
@given(st.data(), shapes, st.integers(2, 4))
def test_views_of_one_storage_go_on_sharing_it(
    data: st.DataObject, shape: tuple[int, ...], count: int
) -> None:
    base = random_tensor(torch.int32, shape, 0)
    assert base.nbytes < UNION_FLOOR_BYTES
    originals = [data.draw(views(base)) for _ in range(count)]
    rebuilt = tensor_trip(*originals)
    written = data.draw(st.integers(0, count - 1))
    for tensors in (originals, rebuilt):
        # Through as_strided, because torch refuses writes to an expanded or unfolded view.
        target = tensors[written]
        if target.numel():
            target.as_strided((1,), (1,), target.storage_offset()).fill_(77)
    for original, arrived in zip(originals, rebuilt, strict=True):
        assert same(arrived, original)


def test_views_of_different_dtypes_share_one_buffer() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    odd, floats, doubles = (
        base[1:],
        base[4:].view(torch.float32),
        base[16:32].view(torch.complex128),
    )
    table, buffers = describe([odd, floats, doubles])
    assert [buffer.nbytes for buffer in buffers] == [64]
    rebuilt = rebuild(table, copies(buffers))
    rebuilt[0].zero_()
    assert not rebuilt[1].any()
    assert not rebuilt[2].any()
    assert rebuilt[0].untyped_storage().data_ptr() == rebuilt[2].untyped_storage().data_ptr()


@cases(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        torch.tensor([1.0, 2.0]).expand(3, 2),
        torch.tensor(1.0).expand(2, 3),
        torch.arange(8.0).unfold(0, 3, 1),
        torch.arange(25.0).view(5, 5).narrow(1, 2, 2),
    ],
)
def test_strides_survive(tensor: Tensor) -> None:
    (rebuilt,) = tensor_trip(tensor)
    assert same(rebuilt, tensor)
    assert rebuilt.stride() == tensor.stride()


def test_an_expanded_tensor_sends_each_element_once() -> None:
    _, buffers = describe([torch.ones(2, 1).expand(2, 10_000)])
    assert [buffer.nbytes for buffer in buffers] == [8]


def test_an_expanded_slice_sends_only_its_own_elements() -> None:
    tensor = torch.arange(3000.0).view(3, 1000)[:, :1].expand(3, 7)
    table, buffers = describe([tensor])
    assert [buffer.nbytes for buffer in buffers] == [12]
    (rebuilt,) = rebuild(table, copies(buffers))
    assert same(rebuilt, tensor)
    assert rebuilt.stride() == (1, 0)


@pytest.mark.parametrize(
    "index", [(5,), (slice(None), 0), (slice(2, 4),), (slice(None, None, 500),)]
)
def test_a_small_view_of_a_large_storage_sends_only_itself(index: tuple[object, ...]) -> None:
    view = torch.arange(1_000_000.0).view(1000, 1000)[index]
    _, buffers = describe([view])
    assert sum(buffer.nbytes for buffer in buffers) == view.nbytes
    assert same(tensor_trip(view)[0], view)


def test_two_columns_of_a_large_matrix_do_not_send_the_matrix() -> None:
    matrix = torch.arange(1_000_000.0).view(1000, 1000)
    first, last, again = matrix[:, 0], matrix[:, -1], matrix[:, 0]
    table, buffers = describe([first, last, again])
    assert sorted(buffer.nbytes for buffer in buffers) == [4000, 4000]
    rebuilt = rebuild(table, copies(buffers))
    assert all(map(same, rebuilt, [first, last, again]))
    rebuilt[0].zero_()
    assert not rebuilt[2].any()  # equal views still share memory
    assert same(rebuilt[1], last)


def test_rows_of_a_matrix_travel_without_those_between() -> None:
    matrix = torch.randn(1000, 1000)
    _, buffers = describe([matrix[0], matrix[999]])
    assert [buffer.nbytes for buffer in buffers] == [4000, 4000]


def test_dense_tensors_travel_from_their_own_memory() -> None:
    tensors = [torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(4, dtype=torch.bfloat16)]
    for tensor in tensors:
        _, (buffer,) = describe([tensor])
        assert buffer.data_ptr() == tensor.data_ptr()
        assert buffer.dim() == 1
        assert not buffer.requires_grad


def test_lazy_values_are_resolved() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    imaginary = numbers.conj().imag
    assert imaginary.is_neg()
    lazy = [numbers.conj(), imaginary, torch._efficientzerotensor(3)]
    expected = [[1 - 2j, 3 + 4j], [-2, 4], [0, 0, 0]]
    for tensor, values in zip(lazy, expected, strict=True):
        assert tensor_trip(tensor)[0].tolist() == values
    assert [tensor.tolist() for tensor in tensor_trip(*lazy)] == expected


def test_rebuilt_tensors_share_the_given_memory_and_keep_it_alive() -> None:
    class Memory(bytearray):
        """A bytearray that can be referenced weakly."""

    table, buffers = describe([torch.ones(2, 2)])
    memory = Memory(copies(buffers)[0])
    (tensor,) = rebuild(table, [memory])
    memory[:4] = b"\0\0\0\0"
    assert tensor[0, 0] == 0
    tensor[1, 1] = 0
    assert memory[12:] == b"\0\0\0\0"
    alive = weakref.ref(memory)
    del memory
    assert alive() is not None
    del tensor
    assert alive() is None


@pytest.mark.parametrize("tensors", [[torch.ones(3)], [torch.ones(2, 2).t(), torch.ones(1)]])
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
        for rebuilt, tensor in zip(rebuild(table, arrived), tensors, strict=True):
            assert same(rebuilt, tensor)
            rebuilt.add_(1)
            assert not same(rebuilt, tensor)


def test_as_memory_shows_the_bytes_themselves() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    memory = as_memory(tensor)
    memory[0:2] = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert tensor.tolist() == [1, 0]
    assert as_memory(torch.empty(0)).nbytes == 0


GRAD_CASES = {
    "plain": torch.ones(2),
    "wants grad": torch.ones(2, requires_grad=True),
    "has history": torch.ones(2, requires_grad=True) * 2,
    "complex": torch.ones(2, dtype=torch.complex64, requires_grad=True),
    "parameter": Parameter(torch.ones(2, 2)),
    "frozen parameter": Parameter(torch.ones(2), requires_grad=False),
    "integer parameter": Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
    "transposed": torch.ones(2, 3, requires_grad=True).t(),
    "empty": torch.ones(0, requires_grad=True),
}


@cases("name", GRAD_CASES)
def test_grad_flags_survive(name: str) -> None:
    tensor = GRAD_CASES[name]
    is_parameter = isinstance(tensor, Parameter)
    table, buffers = describe([tensor])
    is_computed = tensor.grad_fn is not None
    (flags,) = grad_flags(table)
    assert bool(flags & REQUIRES_GRAD) == tensor.requires_grad
    assert bool(flags & PARAMETER) == is_parameter
    assert bool(flags & COMPUTED) == is_computed
    assert not flags & SHARED
    assert bool(table[HEADER.size - 1] & SOME_COMPUTED) == is_computed
    assert bool(table[HEADER.size - 1] & SOME_GRAD) == tensor.requires_grad
    (rebuilt,) = rebuild(table, copies(buffers))
    assert type(rebuilt) is (Parameter if is_parameter else Tensor)
    assert rebuilt.requires_grad == tensor.requires_grad
    assert rebuilt.is_leaf
    (detached,) = rebuild(table, copies(buffers), detached=True)
    assert type(detached) is Tensor
    assert not detached.requires_grad


def test_autograd_notices_changes_through_another_view() -> None:
    base = torch.arange(4.0)
    table, buffers = describe([base, base[1:], base.view(torch.int32)])
    assert all(flags & SHARED for flags in grad_flags(table))
    whole, part, bits = rebuild(table, copies(buffers))
    assert not any(each._is_view() for each in (whole, part, bits))
    weight = torch.ones(3, requires_grad=True)
    for changed in (whole, bits):
        made = weight * part
        changed.zero_()
        assert part.tolist() == [0.0, 0.0, 0.0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


def test_flags_belong_to_their_tensor_in_a_message_of_many() -> None:
    tensors = list(GRAD_CASES.values())
    table, buffers = describe(tensors)
    assert table[HEADER.size - 1] == SOME_GRAD | SOME_COMPUTED
    assert [bool(flags & REQUIRES_GRAD) for flags in grad_flags(table)] == [
        tensor.requires_grad for tensor in tensors
    ]
    rebuilt = rebuild(table, copies(buffers))
    assert [type(tensor) for tensor in rebuilt] == [type(tensor) for tensor in tensors]
    assert describe([torch.ones(1), torch.ones(1)])[0][HEADER.size - 1] == 0


def test_in_place_work_on_what_arrived_leaves_the_sender_alone() -> None:
    tensor = torch.ones(2, 2)
    (rebuilt,) = tensor_trip(tensor)
    rebuilt.mul_(5)
    assert tensor.sum() == 4


def test_no_tensors_make_an_empty_list() -> None:
    table, buffers = describe([])
    assert rebuild(table, buffers) == []
    assert rebuild(b"", []) == grad_flags(b"") == []


def test_many_dimensions_survive() -> None:
    tensor = torch.arange(4.0).view(2, *[1] * 20, 2)
    assert same(tensor_trip(tensor)[0], tensor)


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
def test_what_has_no_plain_memory_is_refused(make: object) -> None:
    with pytest.raises(SerializationError, match="memory"):
        describe([make()])  # type: ignore[operator]


def test_a_missing_device_names_the_device_the_worker_and_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say_that_tensors_are_on("cuda:97", monkeypatch)
    table, buffers = describe([torch.ones(2)] * 2)
    with pytest.raises(SerializationError) as caught:
        rebuild(table, copies(buffers), worker="trainer3")
    text = str(caught.value)
    assert all(part in text for part in ("tensor 0", "cuda:97", "'trainer3'", ".cpu()"))
    assert caught.value.worker == "trainer3"


def say_that_tensors_are_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describes CPU tensors as tensors of ``device``, which a test machine may lack."""
    code = device_code(torch.device(device))
    monkeypatch.setattr(tensors_module, "device_code", lambda _: code)


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_on_a_device_are_put_there(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    # The CPU under another name, to test the round trip.
    monkeypatch.setattr(
        tensors_module, "device_of", lambda code, index, worker: torch.device("cpu", 0)
    )
    base = torch.arange(12.0).view(3, 4)
    tensors = [base.t(), base[1] if shared else torch.ones(4), torch.ones(0)]
    say_that_tensors_are_on("cuda:0", monkeypatch)
    table, buffers = describe(tensors)
    rebuilt = rebuild(table, copies(buffers))
    assert all(map(same, rebuilt, tensors))
    rebuilt[0].zero_()
    assert rebuilt[1].any() != shared


def test_the_wrong_number_of_buffers_is_noticed() -> None:
    table, buffers = describe([torch.ones(2), torch.ones(3)])
    arrived = copies(buffers)
    for wrong in ([], arrived[:1], [*arrived, bytearray(8)]):
        with pytest.raises(ProtocolError, match="buffers"):
            rebuild(table, wrong)


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.ones(2, 2).t(), torch.ones(1).expand(4)])
def test_a_short_buffer_is_noticed(tensor: Tensor) -> None:
    table, (buffer,) = describe([tensor])
    with pytest.raises(ProtocolError, match="needs"):
        rebuild(table, [bytearray(as_memory(buffer))[:-1]])


def lies_inside(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return end <= tensor.untyped_storage().nbytes()


FUZZ_BUFFERS = [bytearray(16), bytearray(48)]
FUZZ_TABLES = [
    describe(tensors)[0]
    for tensors in (
        [torch.ones(4), torch.ones(3, 4)],
        [torch.ones(4), torch.ones(3, 4).t()],
        [torch.ones(4), torch.ones(12, dtype=torch.int32), torch.ones(0)],
        list(itertools.accumulate([torch.ones(4)] * 3, lambda left, _: left[1:])),
    )
]


@settings(max_examples=examples(200))
@given(st.data())
def test_a_damaged_table_never_reaches_outside_the_buffers(data: st.DataObject) -> None:
    table = bytearray(data.draw(st.sampled_from(FUZZ_TABLES)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(table) - 1))
        value = data.draw(st.sampled_from([0, 1, 2, 4, 8, 12, 127, 128, 255]))
        table[place] = value
    if data.draw(st.booleans()):
        table = table[: data.draw(st.integers(0, len(table)))]
    for buffers in (FUZZ_BUFFERS, FUZZ_BUFFERS[:1]):
        try:
            tensors = rebuild(table, buffers)
            grad_flags(table)
        except (ProtocolError, SerializationError):
            continue
        assert all(map(lies_inside, tensors))


@settings(max_examples=examples(100))
@given(st.binary(max_size=80))
def test_random_bytes_are_no_table(table: bytes) -> None:
    try:
        tensors = rebuild(table, FUZZ_BUFFERS)
    except (ProtocolError, SerializationError):
        return
    assert all(map(lies_inside, tensors))


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(1) for _ in range(4)],
        [torch.empty(0) for _ in range(4)],
        list(torch.ones(4).unbind()),  # four views of one buffer
    ],
)
def test_more_tensors_than_the_limit_are_refused_before_any_is_made(
    tensors: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, buffers = describe(tensors)
    assert len(rebuild(table, copies(buffers), limit=4)) == 4
    monkeypatch.setattr(torch, "frombuffer", None)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(SerializationError, match="'ps' accepts at most 3; stack some of them"):
        rebuild(table, copies(buffers), limit=3, worker="ps")


def test_a_count_that_lies_is_refused_too() -> None:
    table = bytearray(describe([torch.ones(2)])[0])
    table[:4] = b"\xff\xff\xff\x7f"
    with pytest.raises(SerializationError, match="2147483647 tensors"):
        rebuild(table, [bytearray(8)], limit=1000)
    with pytest.raises(ProtocolError):
        rebuild(table[:3], [bytearray(8)], limit=1000)


@pytest.mark.parametrize("start", [0, 3])
def test_a_tensor_whose_memory_was_freed_is_refused(start: int) -> None:
    base = torch.arange(10.0)
    tensor = base[start:]
    base.untyped_storage().resize_(0)
    assert inline.encode([tensor]) is None
    with pytest.raises(SerializationError, match="freed"):
        describe([tensor])
    with pytest.raises(SerializationError, match="freed"):
        describe([torch.ones(2), tensor, torch.ones(2).expand(3, 2)])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(0, 3),
        lambda: torch.empty(0, 3).t(),
        lambda: torch.ones(2, 3),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(0, dtype=torch.bfloat16),
    ],
)
def test_tensors_of_the_host_arrive_there_whatever_the_default_device_is(
    make: Callable[[], Tensor],
) -> None:
    sent = make()
    with torch.device("meta"):
        received = object_trip(sent)
        small = inline.encode([sent])
        others = [] if small is None else inline.decode(small[0], 0)[0]
    for each in (received, *others):
        assert each.device.type == "cpu"
        assert torch.equal(each.to_dense(), sent.to_dense())


def test_memory_of_a_device_that_was_freed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with pytest.raises(SerializationError, match="has been freed"):
        describe([freed])


def test_a_tensor_within_a_transform_of_torch_func_is_refused() -> None:
    def send(tensor: Tensor) -> Tensor:
        describe([tensor])
        return tensor.sum()

    for transform in (torch.func.vmap(send), torch.func.grad(send)):
        with pytest.raises(SerializationError, match=r"torch\.func.*in the remote function"):
            transform(torch.ones(2))
