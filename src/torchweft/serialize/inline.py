"""Small tensors as bytes inside their message, without tables and channels.

A table and a channel for each tensor cost several times the copy of a small tensor. So the tensors
of most messages stand in the message itself, each with its memory behind its description.

Layout, little-endian, for each tensor until the end::

    dtype u8 · flags u8 · dimensions u8 · size in bytes u32 · u64 a dimension
    with the flag STRIDED: u64 a stride, in elements
    with the flag SHARED as well: offset u64, in elements · place u64 of the tensor with the memory
    memory

Tensors that overlap in memory arrive as views of one storage: the first brings the memory of all.
Tensors on other devices take a table, and large ones a channel, which moves them faster.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import string_at
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ProtocolError, WeftError
from torchweft.native import native
from torchweft.serialize.reducers import is_dense
from torchweft.serialize.table import (
    CODES,
    COMPUTED,
    INT64_LIMIT,
    NUMPY_DTYPES,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    SIMPLE_NDIM,
    STRIDED,
    USUAL_ADDRESS,
    dtype_of,
    extent,
    flatten,
    is_freed,
    is_worth_a_union,
)

LIMIT_BYTES = 260 * 1024
"""Bytes that one tensor may have, 256 KiB and its head; above it, channels are faster."""
FURTHER_BYTES = 8 * 1024
"""Bytes more for each further tensor of a message: tables take as long as copying so much."""
MESSAGE_LIMIT_BYTES = 2 << 20
"""Bytes that all tensors of a message may have; above it, new memory makes copies slow."""

_HEAD = struct.Struct("<BBBI")
_HEADS = tuple(struct.Struct(f"<BBBI{count}Q") for count in range(2 * SIMPLE_NDIM + 3))
_PLACED = REQUIRES_GRAD | PARAMETER
_FLAGS = REQUIRES_GRAD | PARAMETER | COMPUTED | STRIDED | SHARED

_STRIDED_LAYOUT = torch.strided
_CODES = {dtype: CODES[dtype] for dtype in (*NUMPY_DTYPES, torch.complex64, torch.complex128)}
"""The dtypes of numpy."""
_TORCH = {code: dtype for dtype, code in _CODES.items()}
# The other dtypes of whole bytes travel as integers of their size.
_AS_INTEGERS = {
    dtype: torch.uint8 if dtype.itemsize == 1 else torch.int16
    for dtype in CODES
    if dtype.is_floating_point and dtype not in _CODES and dtype.itemsize <= 2
}
_NUMPY = {code: torch.empty(0, dtype=dtype).numpy().dtype for code, dtype in _TORCH.items()}
_TORCH |= {CODES[dtype]: dtype for dtype in _AS_INTEGERS}
_DIFFERENTIABLE = frozenset(
    code for code, dtype in _TORCH.items() if dtype.is_floating_point or dtype.is_complex
)
_MALFORMED = (
    struct.error,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RuntimeError,
)
"""What numpy, torch and struct raise for sizes that do not fit together."""

Inlined = tuple[bytes, bool]
"""The bytes of tensors, and whether some tensor requires grad."""


NO_TENSORS: Inlined = (b"", False)

shared_ranges: dict[int, int] = {}
"""Start and end of every memory range that may hold tensors which the user shares with other
workers; usually empty. The layer that lends the memory registers it here. These tensors are never
copied into a message, however small they are: the receiver must get the same memory."""


def _limit_bytes(count: int) -> int:
    """Returns how many bytes ``count`` tensors of a message may have."""
    return min(LIMIT_BYTES + (count - 1) * FURTHER_BYTES, MESSAGE_LIMIT_BYTES)


def may_be_shared(address: int) -> bool:
    """Whether a tensor that begins at ``address`` may be shared."""
    return any(start <= address < end for start, end in tuple(shared_ranges.items()))


def encode(tensors: Sequence[Tensor]) -> Inlined | None:
    """Returns ``tensors``, of any kind, as a part of their message; None if they need tables."""
    if native is not None and not shared_ranges:
        made = native.encode_tensors(tensors)
        if made is not None:
            return made
    return _encode(tensors)


def _encode(tensors: Sequence[Tensor]) -> Inlined | None:
    """Does the same; the plain twin, which also takes tensors that overlap in memory."""
    requires_grad = False
    described: list[_Described] = []
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout is not _STRIDED_LAYOUT:
            return None
        flags = 0
        if tensor.requires_grad:
            requires_grad = True
            flags = REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
        if type(tensor) is not Tensor:
            flags |= PARAMETER
        if flags:
            tensor = tensor.detach()
        code = CODES.get(tensor.dtype)
        if tensor.dtype not in _CODES:
            integers = _as_integers(tensor)
            if integers is None:
                return None
            tensor = integers
        try:
            start = tensor.data_ptr()
            if shared_ranges and may_be_shared(start):
                return None
            if start < USUAL_ADDRESS and is_freed(tensor):
                return None
            tensor.numpy()
        except (RuntimeError, TypeError, ValueError):
            return None  # Conjugated, negative, nested, or of a class with its own memory.
        if tensor.dim() > SIMPLE_NDIM or _least_bytes(tensor) > _limit_bytes(len(tensors)):
            return None
        assert code is not None
        described.append(_Described(start, tensor, code, flags))
    content = _encode_described(described)
    return None if content is None else (content, requires_grad)


def _least_bytes(tensor: Tensor) -> int:
    """Counts the bytes of the elements that lie at distinct addresses."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in pairs if stride or not size) * tensor.itemsize


def _as_integers(tensor: Tensor) -> Tensor | None:
    """Returns a dense tensor on the host as integers, if its dtype travels so."""
    kind = _AS_INTEGERS.get(tensor.dtype)
    if kind is None or not tensor.is_cpu or not is_dense(tensor) or tensor.is_neg():
        return None
    return tensor.view(kind)


class _Described(NamedTuple):
    """A detached tensor, where it begins in memory, its dtype as a number, and its flags."""

    start: int
    tensor: Tensor
    code: int
    flags: int


class _Union:
    """Memory that several tensors use, as one range."""

    __slots__ = ("bringer", "end", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.bringer: int | None = None


def _encode_described(described: Sequence[_Described]) -> bytes | None:
    """Returns the bytes of tensors, some of which may overlap; None if they need tables."""
    unions = _unions(described)
    if unions is None:
        return None
    parts: list[bytes] = []
    size_bytes, limit_bytes = 0, _limit_bytes(len(described))
    for index, (start, tensor, code, flags) in enumerate(described):
        sizes: tuple[int, ...] = tensor.shape
        memory = b""
        union = unions.get(index)
        if union is not None:
            offset, rest = divmod(start - union.start, tensor.itemsize)
            if rest:
                return None
            if union.bringer is None:
                union.bringer = index
                memory = string_at(union.start, union.end - union.start)
            flags |= STRIDED | SHARED
            sizes += (*tensor.stride(), offset, union.bringer)
        elif tensor.numel():
            flat, strides = flatten(tensor)
            memory = flat.numpy().tobytes()
            if strides is not None:
                flags |= STRIDED
                sizes += strides
        size_bytes += len(memory) + 7 + 8 * len(sizes)
        if size_bytes > limit_bytes:
            return None
        parts += (_HEADS[len(sizes)].pack(code, flags, tensor.dim(), len(memory), *sizes), memory)
    return b"".join(parts)


def _unions(described: Sequence[_Described]) -> dict[int, _Union] | None:
    """Returns the memory of each tensor that overlaps with others, by its place.

    The extents of the tensors of a union overlap, so all of it is their memory. None if a union
    would be mostly memory between their elements.
    """
    spans = []
    for index, (start, tensor, _, _) in enumerate(described):
        if tensor.numel():
            end = start + extent(tensor.shape, tensor.stride()) * tensor.itemsize
            spans.append((start, end, index))
    spans.sort()
    groups: list[tuple[_Union, list[int]]] = []
    last = -1
    for start, end, index in spans:
        if start >= last:
            groups.append((_Union(start), []))
        union, members = groups[-1]
        members.append(index)
        last = union.end = max(union.end, end)
    unions: dict[int, _Union] = {}
    for union, members in groups:
        if len(members) > 1:
            if not is_worth_a_union(
                union.end - union.start, [described[index].tensor for index in members]
            ):
                return None
            unions.update(dict.fromkeys(members, union))
    return unions


def decode(data: bytes | bytearray | memoryview, position: int) -> tuple[list[Tensor], bytes]:
    """Returns the tensors, each with memory of its own and without grad, and their flags.

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
        made = native.decode_tensors(data, position)
        if made is not None:
            return made
    tensors: list[Tensor] = []
    all_flags = bytearray()
    shared: dict[int, Tensor] = {}
    end = len(data)
    if not 0 <= end - position <= MESSAGE_LIMIT_BYTES:
        raise ProtocolError(f"the tensors of a message have {end - position} bytes")
    try:
        while position < end:
            code, flags, ndim, size_bytes = _HEAD.unpack_from(data, position)
            _check(flags, code, ndim)
            dtype = _dtype_of(code)
            count = ndim * (2 if flags & STRIDED else 1) + (2 if flags & SHARED else 0)
            start = position + _HEAD.size + 8 * count
            numbers = struct.unpack_from(f"<{count}Q", data, position + _HEAD.size)
            position = start + size_bytes
            memory = bytearray(data[start:position])
            if len(memory) != size_bytes:
                raise ProtocolError(f"a tensor of {size_bytes} bytes is cut short")
            shape, strides = numbers[:ndim], numbers[ndim : 2 * ndim]
            if flags & SHARED:
                whole = _shared(shared, numbers[-1], len(tensors), memory, dtype)
                tensor = _view(whole, shape, strides, numbers[-2])
            else:
                tensor = _alone(memory, dtype, shape, strides if flags & STRIDED else None)
            tensors.append(tensor)
            all_flags.append(flags & ~STRIDED)
    except WeftError:
        raise
    except _MALFORMED as error:
        raise ProtocolError(f"the tensors of a message are malformed: {error}") from None
    return tensors, bytes(all_flags) if any(flags & _PLACED for flags in all_flags) else b""


def _dtype_of(code: int) -> torch.dtype:
    """Returns a dtype that small tensors may have; raises as ``table.dtype_of`` does."""
    dtype = dtype_of(code)
    if code not in _TORCH:
        raise ProtocolError(f"a tensor of {dtype} stands in its message")
    return dtype


def _alone(
    memory: bytearray, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> Tensor:
    """Returns a tensor that has its memory for itself; a contiguous one without strides."""
    count = prod(shape) if strides is None else extent(shape, strides)
    if count * dtype.itemsize != len(memory):
        raise ProtocolError(f"a tensor of shape {shape} comes with {len(memory)} bytes")
    if strides is not None:
        if max((*shape, *strides), default=0) >= INT64_LIMIT or prod(shape) >= INT64_LIMIT:
            raise ProtocolError(f"a tensor of shape {shape} has the strides {strides}")
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
    if not memory:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _shared(
    shared: dict[int, Tensor], bringer: int, index: int, memory: bytearray, dtype: torch.dtype
) -> Tensor:
    """Returns the memory that several tensors share, which ``bringer`` brings."""
    if bringer == index:
        shared[index] = torch.frombuffer(memory, dtype=torch.uint8)
    elif memory:
        raise ProtocolError("a view brings memory, and is on that of another tensor")
    whole = shared[bringer]
    if whole.dtype is not dtype:
        whole = whole.view(torch.uint8)
        rest = whole.numel() % dtype.itemsize
        if rest:
            return whole[:-rest].view(dtype)
        whole = shared[bringer] = whole.view(dtype)  # The next view is probably of this dtype.
    return whole


def _view(whole: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    if 0 in shape or max((offset, *shape, *strides)) >= INT64_LIMIT:
        raise ProtocolError(f"a view of shape {shape} has the strides {strides}")
    if prod(shape) >= INT64_LIMIT or offset + extent(shape, strides) > whole.numel():
        raise ProtocolError(f"a view of shape {shape} leaves the memory of its message")
    # Detached: no view to autograd, but with the version counter of the memory.
    return whole.as_strided(shape, strides, offset).detach()


def _check(flags: int, code: int, ndim: int) -> None:
    if ndim > SIMPLE_NDIM:
        raise ProtocolError(f"a tensor of {ndim} dimensions stands in its message")
    is_known = not flags & ~_FLAGS and (flags & STRIDED or not flags & SHARED)
    is_right = flags & REQUIRES_GRAD and code in _DIFFERENTIABLE
    if not is_known or (flags & (REQUIRES_GRAD | COMPUTED) and not is_right):
        raise ProtocolError(f"a tensor of dtype {code} has the impossible flags {flags:#x}")


_DLPACK_KINDS = {
    "torch.bool": 6,
    "torch.bfloat16": 4,
    "torch.float8_e4m3fn": 10,
    "torch.float8_e4m3fnuz": 11,
    "torch.float8_e5m2": 12,
    "torch.float8_e5m2fnuz": 13,
    "torch.float8_e8m0fnu": 14,
}


def _dlpack_kind(dtype: torch.dtype) -> int | None:
    """Returns the number by which DLPack knows a kind of numbers; None where it has none."""
    if str(dtype) in _DLPACK_KINDS:
        return _DLPACK_KINDS[str(dtype)]
    if dtype.is_complex:
        return 5
    if dtype.is_floating_point:
        return 2 if dtype.itemsize > 1 else None
    return 0 if dtype.is_signed else 1


if native is not None:
    for code, dtype in _TORCH.items():
        kind = _dlpack_kind(dtype)
        if kind is not None:
            native.set_dtype(dtype, code, kind, 8 * dtype.itemsize, code in _DIFFERENTIABLE)
