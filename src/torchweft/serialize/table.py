"""The bytes that describe the tensors of a message, and the checks before memory is touched.

::

    header   tensors u32 · buffers u32 · flags u8: 1 if some tensor requires grad, 2 if one of them
             is no leaf, 4 if some tensor belongs on a device
    entry    dtype u8 · flags u8 · dimensions u8 · device type u8 · device index u8 · buffer u32
             size u64 for each dimension
             with the flag STRIDED: offset u64 · stride u64 for each dimension

All numbers are little-endian. Offset and strides count elements, from the start of the buffer. An
empty tensor has no buffer. The table comes from another process and must never cause a read outside
the buffers. So extents are computed here with Python's integers, which do not overflow.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from torchweft.errors import ProtocolError, SerializationError

HEADER = struct.Struct("<IIB")
ENTRY = struct.Struct("<BBBBBI")

REQUIRES_GRAD = 1
PARAMETER = 2
STRIDED = 4
SHARED = 8
"""Other entries use the same buffer: all of them must become views onto one storage."""
COMPUTED = 16
"""The tensor requires grad and is not a leaf: it has a graph at its sender."""

SOME_GRAD = 1
SOME_COMPUTED = 2
"""Flags of the header, which say that some tensor has the flag of that name."""
SOME_ON_DEVICE = 4
"""Flag of the header: some tensor belongs on a device other than the CPU."""

NO_BUFFER = 0xFFFFFFFF
_ALL_FLAGS = REQUIRES_GRAD | PARAMETER | STRIDED | SHARED | COMPUTED
INT64_LIMIT = 1 << 63

SIMPLE_NDIM = 8
"""The most dimensions with which a contiguous tensor takes the fast path."""

SIZES = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(SIMPLE_NDIM + 1))
SIMPLE = tuple(struct.Struct(f"<BBBBBI{ndim}Q") for ndim in range(SIMPLE_NDIM + 1))
"""A whole entry without strides, by its number of dimensions."""


@dataclass(slots=True)
class Entry:
    """The table's description of one tensor."""

    code: int
    flags: int
    shape: tuple[int, ...]
    buffer: int
    device: tuple[int, int] = (0, 0)
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def end(self) -> int:
        """Counts the elements of the buffer up to the last one that this tensor reaches."""
        if self.strides is None:
            return prod(self.shape)
        return self.offset + extent(self.shape, self.strides)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Counts the elements from the first to the last one of a tensor that is not empty."""
    if len(shape) == 1:
        return 1 + (shape[0] - 1) * strides[0]
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@lru_cache(maxsize=256)
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def write(entries: Sequence[Entry], buffer_count: int) -> bytes:
    """Returns the table for ``entries``."""
    flags = 0
    for entry in entries:
        flags |= entry.flags
    of_header = header_flags(flags)
    if any(entry.device[0] for entry in entries):
        of_header |= SOME_ON_DEVICE
    parts = [HEADER.pack(len(entries), buffer_count, of_header)]
    for entry in entries:
        numbers = entry.shape
        if entry.strides is not None:
            numbers = (*entry.shape, entry.offset, *entry.strides)
        parts.append(
            ENTRY.pack(entry.code, entry.flags, len(entry.shape), *entry.device, entry.buffer)
        )
        parts.append(_numbers(len(numbers)).pack(*numbers))
    return b"".join(parts)


def header_flags(flags: int) -> int:
    """Returns the flags of a header for the combined flags of its entries."""
    return (SOME_GRAD if flags & REQUIRES_GRAD else 0) | (SOME_COMPUTED if flags & COMPUTED else 0)


def read(table: bytes | bytearray | memoryview) -> tuple[list[Entry], int]:
    """Returns the entries of a table and how many buffers belong to it.

    The table of a message without tensors is empty.

    Raises:
        ProtocolError: The table is malformed, or describes an impossible tensor.
    """
    if not len(table):
        return [], 0
    try:
        count, buffer_count, _ = HEADER.unpack_from(table)
        # An entry takes nine bytes at least: refuse a count that would loop for ages.
        if count * ENTRY.size > len(table) - HEADER.size:
            raise ProtocolError(f"the tensor table is too short for {count} tensors")
        position, entries = HEADER.size, []
        for _ in range(count):
            entry, position = _read_entry(table, position)
            entries.append(entry)
    except struct.error as error:
        raise ProtocolError(f"the tensor table is cut short: {error}") from None
    if position != len(table):
        raise ProtocolError(f"the tensor table has {len(table) - position} bytes too many")
    for entry in entries:
        _check(entry, buffer_count)
    return entries, buffer_count


def _read_entry(table: bytes | bytearray | memoryview, position: int) -> tuple[Entry, int]:
    code, flags, ndim, *device, buffer = ENTRY.unpack_from(table, position)
    position += ENTRY.size
    strided = flags & STRIDED
    layout = _numbers(2 * ndim + 1 if strided else ndim)
    numbers = layout.unpack_from(table, position)
    entry = Entry(code, flags, numbers[:ndim], buffer, (device[0], device[1]))
    if strided:
        entry.offset, entry.strides = numbers[ndim], numbers[ndim + 1 :]
    return entry, position + layout.size


def _check(entry: Entry, buffer_count: int) -> None:
    if entry.flags & ~_ALL_FLAGS:
        raise ProtocolError(f"the tensor table has the unknown flags {entry.flags:#x}")
    if entry.flags & SHARED and entry.strides is None:
        raise ProtocolError("the tensor table has a shared tensor without strides")
    if max((*entry.shape, *(entry.strides or ()), entry.offset), default=0) >= INT64_LIMIT:
        raise ProtocolError("the tensor table has a size beyond what a tensor can have")
    empty = 0 in entry.shape
    if empty != (entry.buffer == NO_BUFFER) or (not empty and entry.buffer >= buffer_count):
        raise ProtocolError(f"the tensor table names buffer {entry.buffer} of {buffer_count}")
    # Leave out zero sizes: torch multiplies the sizes of an empty shape in this order too.
    if prod(size or 1 for size in entry.shape) >= INT64_LIMIT:
        raise ProtocolError(f"the tensor table has the impossible shape {entry.shape}")


# The memory of one tensor.

UNION_FLOOR_BYTES = 4096
"""A union or extent up to this size is sent whole, whatever part of it the tensors use."""

_UNION_FACTOR = 2

USUAL_ADDRESS = 1 << 40
"""Few tensors begin below it; those of a storage that the program has freed do."""


def is_freed(tensor: Tensor) -> bool:
    """Whether the storage of a dense tensor has been made too small for it."""
    if not tensor.numel():
        return False
    end = tensor.storage_offset() + extent(tensor.shape, tensor.stride())
    return bool(tensor.untyped_storage().nbytes() < end * tensor.element_size())


def is_worth_a_union(union_bytes: int, tensors: Sequence[Tensor]) -> bool:
    """Whether the memory from the first to the last byte of tensors should travel whole."""
    if union_bytes <= UNION_FLOOR_BYTES:
        return True
    wanted_bytes = sum(_distinct(tensor) * tensor.element_size() for tensor in tensors)
    return bool(union_bytes <= _UNION_FACTOR * wanted_bytes)


def flatten(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Returns the elements that travel, and strides unless they are the contiguous ones."""
    if tensor.is_contiguous():
        return tensor.view(-1), None
    strides = tensor.stride()
    length = extent(tensor.shape, strides)
    is_small = length * tensor.element_size() <= UNION_FLOOR_BYTES
    if is_small or length <= _distinct(tensor):
        return tensor.as_strided((length,), (1,)), strides
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot copy every one-byte dtype
    # Dimensions that were expanded hold one element each, in the copy too.
    for dimension, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    copy = tensor.contiguous()
    if 0 not in strides:
        return copy.view(-1), None
    pairs = zip(copy.stride(), strides, strict=True)
    return copy.view(-1), tuple(stride if before else 0 for stride, before in pairs)


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


def _distinct(tensor: Tensor) -> int:
    """Counts the elements of ``tensor`` that can lie at distinct addresses."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in pairs if stride)


# Numbers of dtypes and devices: positions in lists to which names are only ever appended. A dtype
# that the installed torch lacks keeps its number, so that workers with different versions agree.

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

REAL_CODES: dict[torch.dtype, int] = {
    dtype: code for dtype, code in CODES.items() if not dtype.is_complex
}
"""The dtypes that have no lazy conjugate."""


def dtype_of(code: int) -> torch.dtype:
    """Returns the dtype with the number ``code``.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: The torch installed here has no such dtype.
    """
    if code >= len(_DTYPE_NAMES):
        raise ProtocolError(f"the tensor table names the unknown dtype {code}")
    dtype = _DTYPES[code]
    if dtype is None:
        raise SerializationError(
            f"a tensor has dtype torch.{_DTYPE_NAMES[code]}, which torch {torch.__version__} of "
            "this worker does not have; install the same torch on all workers, or convert the "
            "tensor before sending it"
        )
    return dtype


# The position goes over the wire: only ever append.


_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu", "mlu", "privateuseone")
_DEVICE_CODES = {kind: code for code, kind in enumerate(_DEVICE_TYPES)}
_NO_INDEX = 255

HOST = (0, _NO_INDEX)
"""The code of the CPU."""


def device_code(device: torch.device) -> tuple[int, int]:
    """Returns two numbers below 256 for a device."""
    code = _DEVICE_CODES.get(device.type)
    if code is None:
        raise SerializationError(
            f"tensors on device {device} cannot be sent; send tensor.cpu() instead"
        )
    return code, _NO_INDEX if device.index is None or code == 0 else device.index


def device_of(code: tuple[int, int], index: int, worker: str) -> torch.device | None:
    """Returns the device for a code that came from another worker, None for the CPU.

    Args:
        code: The numbers that ``device_code`` returned at the sender.
        index: Position of the tensor in its message, for the error message.
        worker: Name of this worker, for the error message.

    Raises:
        ProtocolError: No version of Weft uses that number.
        SerializationError: This worker has no such device.
    """
    if code[0] == 0:
        return None
    if code[0] >= len(_DEVICE_TYPES):
        raise ProtocolError(f"the tensor table names the unknown device type {code[0]}")
    kind = _DEVICE_TYPES[code[0]]
    position = None if code[1] == _NO_INDEX else code[1]
    count = _device_count(kind)
    if (position or 0) < count:
        return torch.device(kind) if position is None else torch.device(kind, position)
    device = kind if position is None else f"{kind}:{position}"
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
