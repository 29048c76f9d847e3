"""Describes the dense tensors of a message, and makes them of what arrived.

A tensor is described once; its memory stands behind the description (small tensors), or is a buffer
of the message, which a channel moves. Layout, little-endian, for each tensor until the end::

    dtype u8 · flags u8 · dimensions u8 · size in bytes u32 · u64 a dimension
    with the flag STRIDED: u64 a stride, in elements
    with the flag SHARED as well: offset u64, in elements · place u64 of the tensor with the memory
    with the flag ON_DEVICE: u64, the number of a device
    memory; with the flag APART, the next buffer of the message, and no size

Sending each tensor by itself would separate views that share memory: an assignment to one view
would no longer show in the other. Sending whole storages would ship a gigabyte for one row of an
embedding. So:

1. Tensors whose extents (first to last byte) overlap form a cluster.
2. A cluster travels as the union of its extents, which its first tensor brings, and its tensors as
   views onto it. If the union is mostly memory outside the tensors (two columns of a huge matrix),
   the tensors travel one by one.
3. A tensor by itself travels with its strides when it fills its extent (transposed,
   channels-last, expanded) or the extent is small, else as a contiguous copy.

Descriptions come from another process and must never cause a read outside of the memory. So extents
are computed here with Python's integers, which do not overflow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import string_at
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft.errors import ProtocolError, SerializationError
from torchweft.native import native

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Memory = Buffer | Tensor

REQUIRES_GRAD = 1
PARAMETER = 2
STRIDED = 4
SHARED = 8
"""Several tensors have the same memory, and must become views onto one storage."""
COMPUTED = 16
"""The tensor requires grad and is not a leaf: it has a graph at its sender."""
APART = 32
ON_DEVICE = 64
"""The tensor belongs on a device other than the CPU."""

_IN_MESSAGE = REQUIRES_GRAD | PARAMETER | STRIDED | SHARED | COMPUTED
_TOLD = REQUIRES_GRAD | PARAMETER | SHARED | COMPUTED
_PLACED = REQUIRES_GRAD | PARAMETER

LIMIT_BYTES = 260 * 1024
"""Bytes that one tensor in a message may have, 256 KiB and its head; above it, channels are
faster."""
FURTHER_BYTES = 8 * 1024
"""Bytes more for each further tensor of a message: buffers take as long as copying so much."""
MESSAGE_LIMIT_BYTES = 2 << 20
"""Bytes that all tensors in a message may have; above it, new memory makes copies slow."""

INT64_LIMIT = 1 << 63
NO_LIMIT = 1 << 32
_HEAD = struct.Struct("<BBBI")
_STRIDED_LAYOUT = torch.strided
_EMPTY = memoryview(bytearray())
_BYTES = torch.uint8
_ALIGNMENT = 16  # the largest element, complex128: a view's offset stays a whole number

Encoded = tuple[bytes | bytearray, bool]
"""The bytes of tensors, and whether some tensor requires grad."""
NO_TENSORS: Encoded = (b"", False)

NO_MEMORY = (
    "a tensor has no memory that could be sent; within torch.func.grad, vmap, jvp and "
    "functionalize tensors stand for others: call these in the remote function, or, for gradients "
    "through calls, use torchweft.autograd.grad"
)

shared_ranges: dict[int, int] = {}
"""Start and end of every memory range that may hold tensors which the user shares with other
workers; usually empty. The layer that lends the memory registers it here. These tensors are never
copied into a message, however small they are: the receiver must get the same memory."""


def may_be_shared(address: int) -> bool:
    """Whether a tensor that begins at ``address`` may be shared."""
    return any(start <= address < end for start, end in tuple(shared_ranges.items()))


# Numbers of dtypes and devices in messages: positions in lists to which names are only appended. A
# dtype that the installed torch lacks keeps its number, so that workers with different versions
# agree.

_STANDARD = "bool uint8 int8 int16 int32 int64 float16 float32 float64"
_UNSIGNED = "uint16 uint32 uint64"
_COMPLEX = "complex32 complex64 complex128"
_FLOAT8 = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
_BITS = "bits8 bits16 bits1x8 bits2x4 bits4x2"
_SMALL = "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7"
_BY_2_13 = (
    f"{_STANDARD} {_UNSIGNED} {_COMPLEX} bfloat16 {_FLOAT8} float4_e2m1fn_x2 {_BITS} {_SMALL}"
)
_BY_2_15 = "bcomplex32"
_DTYPE_NAMES = tuple(f"{_BY_2_13} {_BY_2_15}".split())

_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES)

CODES: dict[torch.dtype, int] = {
    dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None
}
"""Every dtype whose memory can travel as it is; quantised tensors are taken apart before."""

NUMPY_DTYPES = frozenset(getattr(torch, name) for name in f"{_STANDARD} {_UNSIGNED}".split())
"""The dtypes whose memory numpy can show directly as plain bytes."""


def dtype_of(code: int) -> torch.dtype:
    """Returns the dtype with the number ``code``.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: The torch installed here has no such dtype.
    """
    if code >= len(_DTYPE_NAMES):
        raise ProtocolError(f"a tensor has the unknown dtype {code}")
    dtype = _DTYPES[code]
    if dtype is None:
        raise SerializationError(
            f"a tensor has dtype torch.{_DTYPE_NAMES[code]}, which torch {torch.__version__} of "
            "this worker does not have; install the same torch on all workers, or convert the "
            "tensor before sending it"
        )
    return dtype


_DLPACK_KINDS = {
    0: "int8 int16 int32 int64",
    1: "uint8 uint16 uint32 uint64",
    2: "float16 float32 float64",
    4: "bfloat16",
    5: "complex64 complex128",
    6: "bool",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}
"""The dtypes that the native twin handles, by the numbers of their kinds in DLPack."""


def is_differentiable(dtype: torch.dtype) -> bool:
    """Tells whether tensors of a dtype can require grad."""
    return dtype.is_floating_point or dtype.is_complex


if native is not None:
    for _kind, _names in _DLPACK_KINDS.items():
        for _dtype in [getattr(torch, _name, None) for _name in _names.split()]:
            if _dtype is not None:
                _bits = 8 * _dtype.itemsize
                native.set_dtype(_dtype, CODES[_dtype], _kind, _bits, is_differentiable(_dtype))


_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu", "mlu", "privateuseone")
_DEVICE_CODES = {kind: code for code, kind in enumerate(_DEVICE_TYPES)}
_NO_INDEX = 255

HOST = _NO_INDEX
"""The number of the CPU."""


def device_code(device: torch.device) -> int:
    """Returns the number of a device: its type, and its index in the lowest byte."""
    code = _DEVICE_CODES.get(device.type)
    if code is None:
        raise SerializationError(
            f"tensors on device {device} cannot be sent; send tensor.cpu() instead"
        )
    return code << 8 | (_NO_INDEX if device.index is None or code == 0 else device.index)


def device_of(code: int, index: int, worker: str) -> torch.device | None:
    """Returns the device for a code that came from another worker, None for the CPU.

    Args:
        code: The number that ``device_code`` returned at the sender.
        index: Position of the tensor in its message, for the error message.
        worker: Name of this worker, for the error message.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: This worker has no such device.
    """
    type_code, position = divmod(code, 256)
    if type_code == 0:
        return None
    if type_code >= len(_DEVICE_TYPES):
        raise ProtocolError(f"a tensor belongs on a device of the unknown type {type_code}")
    kind = _DEVICE_TYPES[type_code]
    device = kind if position == _NO_INDEX else f"{kind}:{position}"
    count = _device_count(kind)
    if (0 if position == _NO_INDEX else position) < count:
        return torch.device(device)
    here = f"worker {worker!r}" if worker else "this worker"
    raise SerializationError(
        f"tensor {index} of the message belongs on device {device}, but {here} has "
        f"{_listed(kind, count)}; send tensor.cpu(), or map the device to one that {here} has "
        "(device_maps)",
        worker=worker,
    )


def _device_count(kind: str) -> int:
    try:
        return int(torch.get_device_module(kind).device_count())
    except (AttributeError, RuntimeError):
        return 0  # this torch was built without that kind of device


def _listed(kind: str, count: int) -> str:
    if not count:
        return f"no {kind} device"
    return "only " + ", ".join(f"{kind}:{index}" for index in range(count))


# The memory of one tensor


def is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor of torch's own type is nothing but memory, shape and strides."""
    return (
        tensor.layout is _STRIDED_LAYOUT
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.dtype in CODES
    )


UNION_FLOOR_BYTES = 4096
"""A union or extent up to this size is sent whole, whatever part of it the tensors use."""
_UNION_FACTOR = 2
_USUAL_ADDRESS = 1 << 40
"""Few tensors begin below it; those of a storage that the program has freed do."""


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Counts the elements from the first to the last one of a tensor that is not empty."""
    if len(shape) == 1:
        return 1 + (shape[0] - 1) * strides[0]
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _distinct(tensor: Tensor) -> int:
    """Counts the elements of ``tensor`` that can lie at distinct addresses."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in pairs if stride or not size)


def _is_worth_a_union(union_bytes: int, tensors: Iterable[Tensor]) -> bool:
    """Whether the memory from the first to the last byte of tensors should travel whole."""
    if union_bytes <= UNION_FLOOR_BYTES:
        return True
    wanted_bytes = sum(_distinct(tensor) * tensor.element_size() for tensor in tensors)
    return bool(union_bytes <= _UNION_FACTOR * wanted_bytes)


def flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Returns the elements that travel, and strides unless they are the contiguous ones."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1), None
    strides = tensor.stride()
    length = extent(tensor.shape, strides)
    is_small = length * tensor.element_size() <= UNION_FLOOR_BYTES
    if is_small or length <= _distinct(tensor):
        return tensor.as_strided((length,), (1,)), strides
    if tensor.element_size() == 1:
        tensor = tensor.view(_BYTES)  # torch cannot copy every one-byte dtype
    # Dimensions that were expanded hold one element each, in the copy too.
    for dimension, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    copy = tensor.contiguous()
    if 0 not in strides:
        return copy.view(-1), None
    pairs = zip(copy.stride(), strides, strict=True)
    return copy.view(-1), tuple(stride if before else 0 for stride, before in pairs)


def as_memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of a flat tensor without a copy; the view keeps it alive."""
    if not tensor.numel():
        return _EMPTY
    if tensor.dtype not in NUMPY_DTYPES:
        if tensor.stride(-1) != 1:  # a single element, cut out of a larger tensor
            tensor = tensor.as_strided((1,), (1,))
        tensor = tensor.view(_BYTES)
    return tensor.numpy().data.cast("B")


def separated(tensor: Tensor) -> Tensor:
    """Returns a copy of a dense tensor without a graph, which takes no more than its memory.

    A copy by torch takes as much as the shape announces: an expanded tensor has one element in
    memory for many.
    """
    strides = tensor.stride()
    length = extent(tensor.shape, strides) if tensor.numel() else 0
    if length >= tensor.numel():
        return tensor.clone()
    memory = tensor.as_strided((length,), (1,)).clone()
    return memory.as_strided(tensor.shape, strides).detach()  # No view to autograd.


# Encoding


class _Described(NamedTuple):
    """A detached dense tensor, its address, flags and the number of its device at the receiver."""

    start: int
    tensor: Tensor
    flags: int
    device: int = HOST


def encode_tensors(tensors: Sequence[Tensor]) -> Encoded | None:
    """Returns tensors of any kind with their memory; None if they need buffers."""
    if native is not None and not shared_ranges:
        made: Encoded | None = native.encode_tensors(tensors)
        if made is not None:
            return made
    limit_bytes = min(LIMIT_BYTES + (len(tensors) - 1) * FURTHER_BYTES, MESSAGE_LIMIT_BYTES)
    described: list[_Described] = []
    all_flags = 0
    for tensor in tensors:
        each = _small(tensor, limit_bytes)
        if each is None:
            return None
        described.append(each)
        all_flags |= each.flags
    content = _write(described, None, limit_bytes)
    return None if content is None else (content, bool(all_flags & REQUIRES_GRAD))


def describe(
    tensors: Sequence[Tensor], place: Callable[[torch.device], torch.device] | None = None
) -> tuple[bytes, list[Tensor]]:
    """Returns the descriptions of tensors, and the buffers that have to travel for them.

    Args:
        tensors: Dense tensors of any shape, strides and dtype; ``objects.pack`` has already taken
            apart other tensors (sparse, quantised, nested).
        place: Returns the device on which a tensor arrives, for its device here; None if that is
            the device of the same name.

    Returns:
        The descriptions, and one-dimensional contiguous tensors, each on the device that the
        tensors in it are on. They share the memory of ``tensors`` wherever that is possible, so it
        may not change until they are sent.

    Raises:
        SerializationError: A tensor has no memory of its own that could be sent, or ``place``
            raised it.
    """
    described: list[_Described] = []
    for tensor in tensors:
        source, device = _as_dense(tensor), HOST
        if place is not None:
            device = device_code(place(source.device))
        elif not source.is_cpu:
            device = device_code(source.device)
        described.append(_Described(source.data_ptr(), source, _flags_of(tensor), device))
    buffers: list[Tensor] = []
    content = _write(described, buffers, NO_LIMIT)
    assert content is not None
    return content, buffers


def _flags_of(tensor: Tensor) -> int:
    flags = PARAMETER if type(tensor) is Parameter else 0
    if tensor.requires_grad:
        flags |= REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
    return flags


def _small(tensor: Tensor, limit_bytes: int) -> _Described | None:
    """Describes a tensor whose memory stands in the message; None for others."""
    if not tensor.is_cpu or not is_dense(tensor):
        return None
    try:
        source = _as_dense(tensor)
    except SerializationError:
        return None  # It raises again where buffers are made.
    start = source.data_ptr()
    if shared_ranges and may_be_shared(start):
        return None
    if source.nbytes > limit_bytes and _distinct(source) * source.itemsize > limit_bytes:
        return None
    return _Described(start, source, _flags_of(tensor))


def _as_dense(tensor: Tensor) -> Tensor:
    """Returns a detached tensor whose memory holds the values as the user sees them."""
    if not is_dense(tensor):
        raise SerializationError(
            f"a tensor of dtype {tensor.dtype} and layout {tensor.layout} on device "
            f"{tensor.device} has no plain memory; send it as an argument or a result, which takes "
            "it apart, or as its dense equivalent"
        )
    if tensor.requires_grad or type(tensor) is not Tensor:
        tensor = tensor.detach().as_subclass(Tensor)
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    try:
        start = tensor.data_ptr()
    except RuntimeError as error:
        raise SerializationError(NO_MEMORY) from error
    if (
        start < _USUAL_ADDRESS
        and (tensor.is_cpu or tensor.is_cuda)
        and (tensor.numel() and not tensor.untyped_storage().nbytes())
    ):
        raise SerializationError(
            f"the memory of a tensor of shape {tuple(tensor.shape)} has been freed: its storage "
            "has 0 bytes; send it before that is resized"
        )
    if not start and tensor.numel():
        raise SerializationError(NO_MEMORY)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _write(
    described: Sequence[_Described], apart: list[Tensor] | None, limit_bytes: int
) -> bytes | None:
    """Returns the descriptions of tensors.

    Args:
        described: The tensors.
        apart: A list that gets their memory; None for memory in the message.
        limit_bytes: How many bytes may be returned.

    Returns:
        The bytes; None if there are too many, or if the elements of a tensor do not lie at a whole
        distance from those of another one.
    """
    unions = _unions(described, is_apart=apart is not None) if len(described) > 1 else {}
    parts: list[bytes] = []
    size_bytes = 0
    for place, (start, tensor, flags, device) in enumerate(described):
        numbers: tuple[int, ...] = tensor.shape
        memory: Tensor | bytes | None = None
        union = unions.get(place)
        if union is not None:
            flags |= STRIDED | SHARED
            offset, rest = divmod(start - union.start, tensor.itemsize)
            if rest:
                return None
            if union.bringer is None:
                union.bringer = place
                memory = union.memory(is_apart=apart is not None)
            numbers = (*numbers, *tensor.stride(), offset, union.bringer)
        elif tensor.numel():
            memory, strides = flatten(tensor)
            if strides is not None:
                flags |= STRIDED
                numbers = (*numbers, *strides)
        if device != HOST and (union is None or memory is not None):
            flags |= ON_DEVICE
            numbers = (*numbers, device)
        content = b""
        if memory is not None:
            if apart is None:
                content = memory if isinstance(memory, bytes) else bytes(as_memory(memory))
            else:
                assert isinstance(memory, Tensor)
                flags |= APART
                # Only the host's memory becomes tensors of the receiver's CPU.
                apart.append(memory.cpu() if device == HOST and not memory.is_cpu else memory)
        head = _HEAD.pack(CODES[tensor.dtype], flags, tensor.dim(), len(content))
        parts += (head, struct.pack(f"<{len(numbers)}Q", *numbers), content)
        size_bytes += _HEAD.size + 8 * len(numbers) + len(content)
        if size_bytes > limit_bytes:
            return None
    return b"".join(parts)


class _Union:
    """Memory that several tensors of a message have.

    Args:
        start: Its first address.
        end: The address behind it.
        first: One of the tensors.
    """

    __slots__ = ("_end", "_first", "bringer", "start")

    def __init__(self, start: int, end: int, first: Tensor) -> None:
        self.start = start
        self._end = end
        self._first = first
        self.bringer: int | None = None

    def memory(self, *, is_apart: bool) -> Tensor | bytes:
        """Returns its bytes, or a tensor that shares them."""
        first = self._first
        if not is_apart:
            return string_at(self.start, self._end - self.start)
        storage = first.untyped_storage()
        union = torch.empty(0, dtype=_BYTES, device=first.device)
        return union.set_(storage, self.start - storage.data_ptr(), (self._end - self.start,), (1,))


_Span = tuple[int, int, int, int]
"""The device, the first address, the end and the place of a tensor in its message."""


def _unions(described: Sequence[_Described], *, is_apart: bool) -> dict[int, _Union]:
    """Returns the memory of each tensor that has some in common with others, by its place."""
    spans: list[_Span] = []
    for place, (start, tensor, _, _) in enumerate(described):
        if tensor.numel():
            is_whole = tensor.is_contiguous()
            count = tensor.numel() if is_whole else extent(tensor.shape, tensor.stride())
            spans.append((tensor.get_device(), start, start + count * tensor.itemsize, place))
    unions: dict[int, _Union] = {}
    for start, end, places in _clusters(spans):
        tensors = [described[place].tensor for place in places]
        first = tensors[0]
        # A channel moves memory of one storage; arrays of numpy may have one storage each.
        is_one = not is_apart or len({each.untyped_storage().data_ptr() for each in tensors}) == 1
        if is_one and _is_worth_a_union(end - start, tensors):
            start -= int(first.storage_offset()) * first.itemsize % _ALIGNMENT
            unions.update(dict.fromkeys(places, _Union(start, end, first)))
    return unions


def _clusters(spans: list[_Span]) -> Iterator[tuple[int, int, list[int]]]:
    """Yields the first address, the end and the places of tensors whose extents overlap."""
    spans.sort()
    places: list[int] = []
    here, begin, last = 0, 0, -1
    for device, start, end, place in spans:
        if start >= last or device != here:
            if len(places) > 1:
                yield begin, last, places
            places, here, begin, last = [], device, start, end
        places.append(place)
        last = max(last, end)
    if len(places) > 1:
        yield begin, last, places


# Decoding. Every extent is checked against the memory it lies in before torch makes a tensor there:
# versions of torch differ in the errors that they raise, or miss, about sizes.


class Entry(NamedTuple):
    """The description of one tensor, as it was received and checked.

    Attributes:
        dtype: The dtype.
        flags: The flags.
        shape: The sizes.
        strides: The strides; None for the contiguous ones.
        offset: Where its elements begin in the memory.
        length: The elements of the memory up to the last one of the tensor; 0 for an empty one.
        place: The tensor of the message that brings the memory.
        memory: The memory that it brings, or the number of its buffer; None if it brings none.
        device: The number of its device.
    """

    dtype: torch.dtype
    flags: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    length: int
    place: int
    memory: bytearray | int | None
    device: int


def decode_tensors(
    data: bytes | bytearray | memoryview, position: int
) -> tuple[list[Tensor], bytes]:
    """Returns the tensors in a message, without grad, and their flags.

    Args:
        data: A message.
        position: Where in ``data`` the tensors begin; they go on to the end.

    Returns:
        The tensors, and a byte of flags for each; none if no tensor required grad or was a
        parameter.

    Raises:
        ProtocolError: The bytes are malformed.
        SerializationError: This worker lacks a dtype.
    """
    if native is not None:
        made: tuple[list[Tensor], bytes] | None = native.decode_tensors(data, position)
        if made is not None:
            return made
    if not 0 <= len(data) - position <= MESSAGE_LIMIT_BYTES:
        raise ProtocolError(f"the tensors of a message have {len(data) - position} bytes")
    return rebuild(read(data, position, known_flags=_IN_MESSAGE))


def read(
    data: bytes | bytearray | memoryview,
    position: int = 0,
    *,
    known_flags: int = _IN_MESSAGE | APART | ON_DEVICE,
    worker: str = "",
    limit: int = NO_LIMIT,
) -> list[Entry]:
    """Reads the descriptions of tensors, from a position to the end.

    Args:
        data: A message, or what ``describe`` returned.
        position: Where they begin.
        known_flags: The flags that may occur.
        worker: Name of this worker, for error messages.
        limit: How many tensors this worker accepts in one message.

    Raises:
        ProtocolError: The bytes are malformed, or describe an impossible tensor.
        SerializationError: This worker lacks a dtype, or there are more tensors than the limit.
    """
    entries: list[Entry] = []
    buffer_count = 0
    while position < len(data):
        place = len(entries)
        if place >= limit:
            raise too_many(limit, worker)
        try:
            code, flags, ndim, size_bytes = _HEAD.unpack_from(data, position)
            count = ndim * (2 if flags & STRIDED else 1)
            count += (2 if flags & SHARED else 0) + (1 if flags & ON_DEVICE else 0)
            numbers = struct.unpack_from(f"<{count}Q", data, position + _HEAD.size)
        except struct.error as error:
            raise ProtocolError(f"the description of a tensor is cut short: {error}") from None
        position += _HEAD.size + 8 * count
        dtype = dtype_of(code)
        if flags:
            _check_flags(flags, known_flags, dtype)
        shape, strides = numbers[:ndim], numbers[ndim : 2 * ndim] if flags & STRIDED else None
        offset, bringer = numbers[2 * ndim : 2 * ndim + 2] if flags & SHARED else (0, place)
        length = prod(shape)
        if not length or max(numbers, default=0) >= INT64_LIMIT or length >= INT64_LIMIT:
            _check_sizes(shape, strides, numbers)
        if strides is not None:
            length = offset + extent(shape, strides)
        memory: bytearray | int | None = None
        if bringer != place:
            source = entries[bringer] if bringer < place else None
            if source is None or source.memory is None or not source.flags & SHARED:
                raise ProtocolError(f"a view is on the memory of tensor {bringer}, which has none")
        elif flags & APART:
            memory = buffer_count
            buffer_count += 1
        elif length:
            memory = bytearray(data[position : position + size_bytes])
            if not flags & SHARED and length * dtype.itemsize != size_bytes:
                raise ProtocolError(f"a tensor of shape {shape} comes with {size_bytes} bytes")
        held_bytes = len(memory) if isinstance(memory, bytearray) else 0
        if held_bytes != size_bytes or (memory is not None and not length):
            raise ProtocolError(f"a tensor of {length} elements comes with other memory")
        position += size_bytes
        device = numbers[-1] if flags & ON_DEVICE else HOST
        entries.append(Entry(dtype, flags, shape, strides, offset, length, bringer, memory, device))
    return entries


def _check_flags(flags: int, known_flags: int, dtype: torch.dtype) -> None:
    is_known = not flags & ~known_flags and (flags & STRIDED or not flags & SHARED)
    is_right = flags & REQUIRES_GRAD and is_differentiable(dtype)
    if not is_known or (flags & (REQUIRES_GRAD | COMPUTED) and not is_right):
        raise ProtocolError(f"a tensor of {dtype} has the impossible flags {flags:#x}")


def _check_sizes(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, numbers: tuple[int, ...]
) -> None:
    # Leave out zero sizes: torch multiplies the sizes of an empty shape in this order too.
    product = prod(size or 1 for size in shape)
    is_strided = 0 in shape and strides is not None
    if is_strided or product >= INT64_LIMIT or max(numbers, default=0) >= INT64_LIMIT:
        raise ProtocolError(f"no tensor has the shape {shape} and the strides {strides}")


def rebuild(
    entries: Sequence[Entry], buffers: Sequence[Memory] = (), worker: str = ""
) -> tuple[list[Tensor], bytes]:
    """Returns the tensors of descriptions, without grad, and their flags; see ``decode_tensors``.

    Tensors share the memory of ``buffers`` that is on their device, and keep it alive. Memory that
    is read-only or not aligned to the element size is copied instead; align it to 16 bytes.

    Args:
        entries: What ``read`` returned.
        buffers: The bytes of the sender's buffers, in order, each at least as long; flat tensors
            where they are on a device already.
        worker: Name of this worker, for error messages.

    Raises:
        ProtocolError: The descriptions reach beyond the memory.
        SerializationError: This worker lacks a device.
    """
    tensors: list[Tensor] = []
    told, all_flags, buffer_count = bytearray(), 0, 0
    shared: dict[int, dict[torch.dtype, Tensor]] = {}
    for index, entry in enumerate(entries):
        dtype, flags, shape, strides, offset, length, place, memory, number = entry
        told.append(flags & _TOLD)
        all_flags |= flags
        device = device_of(number, index, worker) if flags & ON_DEVICE else None
        if not length:
            tensors.append(torch.empty(shape, dtype=dtype, device=device or "cpu"))
            continue
        if memory is None:
            flat = _as(dtype, shared[place])
        else:
            if isinstance(memory, int):
                buffer_count += 1
                if buffer_count > len(buffers):
                    break
                flat = _flat(buffers[memory], dtype, length, flags, index)
            else:
                flat = _flat(memory, dtype, length, flags, index)
            if device is not None:
                flat = flat.to(device)
            if flags & SHARED:
                shared[place] = {flat.dtype: flat}
                flat = _as(dtype, shared[place])
        if flags & SHARED:
            if length > flat.numel():
                raise ProtocolError(f"tensor {index} of the message leaves the memory it is on")
            view = flat.as_strided(shape, strides or (), flat.storage_offset() + offset)
            # Detached, so no view to autograd, but with the shared version counter: autograd
            # notices if another view was changed in place after this one was saved for a backward
            # pass.
            flat = view.detach()
        elif strides is not None:
            flat = flat.as_strided(shape, strides)
        elif len(shape) != 1:
            flat = flat.view(shape)
        tensors.append(flat)
    if buffer_count != len(buffers):
        raise ProtocolError(f"the tensors of a message do not go with its {len(buffers)} buffers")
    return tensors, bytes(told) if all_flags & _PLACED else b""


def _flat(buffer: Memory, dtype: torch.dtype, length: int, flags: int, index: int) -> Tensor:
    """Returns a flat tensor on the memory of a buffer, or on a copy of that.

    Args:
        buffer: The memory.
        dtype: The dtype of the tensor; of shared memory, if it has a whole number of elements.
        length: How many elements the tensor takes of it.
        flags: Its flags. With ``SHARED``, others have the rest of the memory, as any dtype.
        index: Position of the tensor in its message, for the error message.
    """
    alignment = dtype.itemsize
    size_bytes = length * alignment
    memory = (
        buffer.detach().view(-1).view(_BYTES) if isinstance(buffer, Tensor) else memoryview(buffer)
    )
    if size_bytes > memory.nbytes:
        raise ProtocolError(
            f"tensor {index} of the message needs {size_bytes} bytes of a buffer of "
            f"{memory.nbytes} bytes"
        )
    if flags & SHARED:
        size_bytes, alignment = memory.nbytes, _ALIGNMENT
        if size_bytes % dtype.itemsize:
            dtype = _BYTES
        length = size_bytes // dtype.itemsize
    if isinstance(memory, Tensor):
        part = memory[:size_bytes]
        is_aligned = not (part.data_ptr() % alignment or part.storage_offset() % alignment)
        return (part if is_aligned else part.clone()).view(dtype)
    if not memory.readonly:
        flat = torch.frombuffer(memory, dtype=dtype, count=length)
        if not flat.data_ptr() % alignment:
            return flat
    return torch.frombuffer(bytearray(memory[:size_bytes]), dtype=dtype)


def _as(dtype: torch.dtype, memories: dict[torch.dtype, Tensor]) -> Tensor:
    """Returns memory as whole elements of a dtype, and keeps that beside its other forms."""
    found = memories.get(dtype)
    if found is None:
        memory = next(iter(memories.values())).view(_BYTES)
        rest = memory.numel() % dtype.itemsize
        found = memories[dtype] = (memory[:-rest] if rest else memory).view(dtype)
    return found


def with_flags(tensors: list[Tensor], flags: Sequence[int]) -> list[Tensor]:
    """Has received tensors require grad, and makes parameters of them, as their flags say."""
    for place, flag in enumerate(flags):
        if flag & PARAMETER:
            tensors[place] = Parameter(tensors[place], bool(flag & REQUIRES_GRAD))
        elif flag & REQUIRES_GRAD:
            tensors[place].requires_grad_()
    return tensors


def devices_of(entries: Sequence[Entry], worker: str = "") -> dict[int, torch.device | None]:
    """Returns the device on which each buffer of a message belongs; None for the CPU.

    Raises:
        ProtocolError: A device has an unknown type.
        SerializationError: This worker lacks a device.
    """
    return {
        entry.memory: device_of(entry.device, index, worker)
        for index, entry in enumerate(entries)
        if isinstance(entry.memory, int)
    }


def too_many(limit: int, worker: str = "") -> SerializationError:
    """Returns the error for a message of more tensors than the limit.

    Args:
        limit: How many tensors it may have.
        worker: Name of the receiving worker; empty at the sender.
    """
    who = f"worker {worker!r} accepts" if worker else "this worker sends"
    return SerializationError(
        f"a message has too many tensors, and {who} at most {limit}; stack some of them, or "
        "send several messages",
        worker=worker,
    )
