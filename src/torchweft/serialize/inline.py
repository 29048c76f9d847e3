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
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.serialize.extents import USUAL_ADDRESS, flatten, is_freed, place
from torchweft.serialize.reducers import is_dense
from torchweft.serialize.table import (
    CODES,
    COMPUTED,
    INT64_LIMIT,
    NO_BUFFER,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    SIMPLE_NDIM,
    SIZES,
    STRIDED,
    dtype_of,
    extent,
)
from torchweft.serialize.tensors import as_dense, as_memory

LIMIT_BYTES = 68 * 1024
"""All tensors of a message together, 64 KiB and their heads; above it, channels are faster."""

_ALONE_BYTES = 64 * 1024
_HEAD = struct.Struct("<BBBI")
_HEADS = tuple(struct.Struct(f"<BBBI{count}Q") for count in range(2 * SIMPLE_NDIM + 3))
_SHARED = struct.Struct("<QQ")
_PLACED = REQUIRES_GRAD | PARAMETER
_CONTIGUOUS = frozenset(
    grad | kind for grad in (0, REQUIRES_GRAD, REQUIRES_GRAD | COMPUTED) for kind in (0, PARAMETER)
)
"""The flags that a contiguous tensor may have."""
_FLAGS = REQUIRES_GRAD | PARAMETER | COMPUTED | STRIDED | SHARED

# What numpy calls the formats of memory; 64-bit integers are a long, or a long long elsewhere.
_DTYPES = {
    "?": torch.bool,
    "B": torch.uint8,
    "b": torch.int8,
    "h": torch.int16,
    "i": torch.int32,
    "q": torch.int64,
    "l": torch.int64,
    "e": torch.float16,
    "f": torch.float32,
    "d": torch.float64,
    "F": torch.complex64,
    "Zf": torch.complex64,
    "D": torch.complex128,
    "Zd": torch.complex128,
    "H": torch.uint16,
    "I": torch.uint32,
    "L": torch.uint64,
    "Q": torch.uint64,
}
_CODES = {name: CODES[dtype] for name, dtype in _DTYPES.items()}
_TORCH = {CODES[dtype]: dtype for dtype in _DTYPES.values()}
# The other dtypes of whole bytes travel as integers of their size.
_AS_INTEGERS = {
    dtype: torch.uint8 if dtype.itemsize == 1 else torch.int16
    for dtype in CODES
    if dtype.is_floating_point and dtype not in _DTYPES.values() and dtype.itemsize <= 2
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


class EncodedValue(NamedTuple):
    """A value as the parts of a message that it becomes, with small tensors without grad.

    Attributes:
        payload: Its payload; empty for a tensor.
        content: Its tensors, as ``encode`` returns them.
    """

    payload: bytes
    content: bytes


NO_TENSORS: Inlined = (b"", False)

shared_ranges: dict[int, int] = {}
"""Start and end of every memory range that may hold tensors which the user shares with other
workers; usually empty. The layer that lends the memory registers it here. These tensors are never
copied into a message, however small they are: the receiver must get the same memory."""


def may_be_shared(address: int) -> bool:
    """Whether a tensor that begins at ``address`` may be shared."""
    return any(start <= address < end for start, end in tuple(shared_ranges.items()))


def encode(tensors: Sequence[Tensor]) -> Inlined | None:
    """Returns ``tensors``, of any kind, as a part of their message; None if they need tables."""
    if len(tensors) != 1 or shared_ranges:
        return _encode_any(tensors)
    (tensor,) = tensors
    if type(tensor) is not Tensor or tensor.requires_grad:
        return _encode_any(tensors)
    if not tensor.is_cpu:
        return None  # The exception below would take as long as a small call.
    # The usual content of a message: one contiguous tensor without grad.
    try:
        if tensor.data_ptr() < USUAL_ADDRESS:
            return _encode_any(tensors)
        memory: Any = tensor.numpy().data
        code = _CODES[memory.format]
    except (RuntimeError, TypeError, KeyError):
        return _encode_any(tensors) if tensor.is_cpu else None
    ndim, count = memory.ndim, memory.nbytes
    if not memory.c_contiguous or count > _ALONE_BYTES or ndim > SIMPLE_NDIM:
        return _encode_any(tensors)
    return b"".join((_HEADS[ndim].pack(code, 0, ndim, count, *memory.shape), memory)), False


def encode_rows(tensor: Tensor) -> list[bytes] | None:
    """Returns the rows of a tensor, each as ``encode`` would; None if they need a closer look.

    Takes a fraction of the time of separate rows.
    """
    if type(tensor) is not Tensor or tensor.requires_grad or shared_ranges or not tensor.is_cpu:
        return None
    try:
        memory: Any = tensor.numpy().data
        code = _CODES[memory.format]
    except (RuntimeError, TypeError, KeyError):
        return None
    rows, *shape = memory.shape
    ndim, count = len(shape), memory.nbytes // rows if rows else 0
    if not count or not memory.c_contiguous or count > _ALONE_BYTES or ndim > SIMPLE_NDIM:
        return None
    head = _HEADS[ndim].pack(code, 0, ndim, count, *shape)
    content = memory.tobytes()
    return [head + content[start : start + count] for start in range(0, memory.nbytes, count)]


def _encode_any(tensors: Sequence[Tensor]) -> Inlined | None:
    """Does the same for tensors that may need a closer look, in one loop."""
    is_alone = len(tensors) == 1
    parts: list[Any] = []
    size_bytes = 0
    requires_grad = False
    spans: list[tuple[int, int]] | None = None if is_alone else []
    for tensor in tensors:
        if not tensor.is_cpu:
            return None
        flags = 0
        if tensor.requires_grad:
            requires_grad = True
            flags = REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
        if type(tensor) is not Tensor:
            flags |= PARAMETER
        if flags:
            tensor = tensor.detach()
        try:
            start = tensor.data_ptr()
            if shared_ranges and may_be_shared(start):
                return None
            if start < USUAL_ADDRESS and is_freed(tensor):
                return None
            memory: Any = tensor.numpy().data
            code = _CODES[memory.format]
        except (RuntimeError, TypeError, KeyError, ValueError):
            # Not on the CPU, not dense, or of a dtype that numpy lacks.
            integers = _as_integers(tensor)
            if integers is None:
                return None
            code, memory = CODES[tensor.dtype], integers.numpy().data
            tensor = integers
        ndim = memory.ndim
        if ndim > SIMPLE_NDIM:
            return None
        sizes, places = memory.shape, ndim
        if memory.c_contiguous:
            count = memory.nbytes
        elif memory.nbytes > LIMIT_BYTES and 0 not in memory.strides:
            return None  # Tables need no copy of it, or make their own.
        elif is_alone:
            flat, strides = flatten(tensor)
            memory = flat.numpy().data
            count = memory.nbytes
            if strides is not None:
                flags |= STRIDED
                sizes += strides
                places = 2 * ndim
        else:
            return _encode_views(tensors)
        size_bytes += count + 7 + 8 * places
        if size_bytes > LIMIT_BYTES:
            return None
        parts.append(_HEADS[places].pack(code, flags, ndim, count, *sizes))
        if count:
            parts.append(memory)
            if spans is not None:
                spans.append((start, start + count))
    if spans is not None:
        spans.sort()
        end = 0
        for start, next_end in spans:
            if start < end:
                return _encode_views(tensors)
            end = next_end
    return b"".join(parts), requires_grad


def _as_integers(tensor: Tensor) -> Tensor | None:
    """Returns a dense tensor on the host as integers, if its dtype travels so."""
    kind = _AS_INTEGERS.get(tensor.dtype)
    if kind is None or not tensor.is_cpu or not is_dense(tensor) or tensor.is_neg():
        return None
    return tensor.view(kind)


def _encode_views(tensors: Sequence[Tensor]) -> Inlined | None:
    """Does the same for tensors some of which overlap in memory."""
    if not all(tensor.is_cpu for tensor in tensors):
        return None  # Before anything is copied on a device.
    try:
        sources = [as_dense(tensor) for tensor in tensors]
        if shared_ranges and any(may_be_shared(source.data_ptr()) for source in sources):
            return None
        placements, buffers = place(sources)
        memories = [as_memory(flat) for flat in buffers]
    except (RuntimeError, TypeError, ValueError, SerializationError):
        return None
    requires_grad = False
    parts: list[Any] = []
    size_bytes = 0
    bringers: dict[int, int] = {}
    for index, (tensor, placement) in enumerate(zip(tensors, placements, strict=True)):
        flags = 0 if type(tensor) is Tensor else PARAMETER
        if tensor.requires_grad:
            requires_grad = True
            flags |= REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
        memory: Any = b""
        sizes: tuple[int, ...] = tensor.shape
        bringer = bringers.setdefault(placement.buffer, index)
        if placement.buffer != NO_BUFFER and bringer == index:
            memory = memories[placement.buffer]
        if placement.strides is not None:
            flags |= STRIDED
            sizes += placement.strides
            if placement.shared:
                flags |= SHARED
                sizes += (placement.offset, bringer)
        count = len(memory)
        size_bytes += count + 7 + 8 * len(sizes)
        code = CODES.get(tensor.dtype)
        if size_bytes > LIMIT_BYTES or code not in _TORCH or len(sizes) >= len(_HEADS):
            return None
        parts += (_HEADS[len(sizes)].pack(code, flags, tensor.dim(), count, *sizes), memory)
    return b"".join(parts), requires_grad


def decode(data: bytes | bytearray | memoryview, position: int) -> tuple[list[Tensor], list[int]]:
    """Returns the tensors, each with memory of its own and without grad, and their flags.

    Args:
        data: A message.
        position: Where in ``data`` the tensors begin; they go on to the end.

    Returns:
        The tensors, and the flags of each; none if no tensor required grad or was a parameter.

    Raises:
        ProtocolError: The bytes are malformed.
        SerializationError: This worker lacks a dtype.
    """
    tensors: list[Tensor] = []
    all_flags: list[int] = []
    shared: dict[int, Tensor] = {}
    end = len(data)
    if end - position > LIMIT_BYTES:
        raise ProtocolError(f"the tensors of a message have {end - position} bytes, too many")
    try:
        while position < end:
            code, flags, ndim, size_bytes = _HEAD.unpack_from(data, position)
            position += 7
            shape = SIZES[ndim].unpack_from(data, position)
            position += 8 * ndim
            if flags and flags not in _CONTIGUOUS:
                if flags & SHARED:
                    tensor, position = _view(
                        data, position, code, flags, shape, size_bytes, len(tensors), shared
                    )
                else:
                    tensor, position = _strided(data, position, code, flags, shape, size_bytes)
                if flags & _PLACED or all_flags:
                    all_flags += [0] * (len(tensors) - len(all_flags))
                    all_flags.append(flags & ~STRIDED)
                tensors.append(tensor)
                continue
            start, position = position, position + size_bytes
            # Copy it: one tensor must not keep the memory of a whole message.
            memory = bytearray(data[start:position])
            if code not in _NUMPY:
                tensor, is_whole = _other(code, shape, memory), True
            elif not size_bytes and 0 in shape:  # Other dimensions may be beyond numpy's limit.
                tensor, is_whole = torch.empty(shape, dtype=_TORCH[code], device="cpu"), True
            elif ndim == 1 and size_bytes:
                dtype = _TORCH[code]
                tensor = torch.frombuffer(memory, dtype=dtype)
                is_whole = shape[0] * dtype.itemsize == size_bytes
            else:
                array = np.ndarray(shape, _NUMPY[code], memory)
                tensor = torch.from_numpy(array)
                is_whole = array.nbytes == size_bytes
            if not is_whole or len(memory) != size_bytes:
                raise ProtocolError(f"a tensor of shape {shape} comes with {size_bytes} bytes")
            if flags or all_flags:
                if flags & REQUIRES_GRAD and code not in _DIFFERENTIABLE:
                    raise ProtocolError(f"a tensor of {tensor.dtype} cannot require grad")
                all_flags += [0] * (len(tensors) - len(all_flags))
                all_flags.append(flags)
            tensors.append(tensor)
    except WeftError:
        raise
    except _MALFORMED as error:
        raise ProtocolError(f"the tensors of a message are malformed: {error}") from None
    return tensors, all_flags


def decode_stacked(messages: Sequence[bytes], count: int) -> list[Tensor] | None:
    """Returns the tensors of several messages, stacked; None if they need a closer look.

    Takes a fraction of the time of separate tensors.

    Args:
        messages: The tensors of each message, as ``encode`` returned them.
        count: How many tensors each message must have.

    Returns:
        A contiguous tensor with memory of its own for each of the ``count``, with a row for each
        message. None unless all messages have tensors without grad of the same dtypes, shapes and
        strides, none of which shares memory with another.
    """
    first = messages[0]
    size_bytes = len(first)
    places = _places(first, count)
    if places is None or set(map(len, messages)) != {size_bytes}:
        return None
    rows = np.frombuffer(b"".join(messages), np.uint8).reshape(len(messages), size_bytes)
    stacked = []
    head = 0
    for dtype, shape, strides, start, end in places:
        if (rows[:, head:start] != rows[0, head:start]).any():
            return None
        flat = torch.from_numpy(rows[:, start:end].copy()).view(dtype)
        if strides is None:
            stacked.append(flat.view(len(messages), *shape))
        else:
            row = (end - start) // dtype.itemsize
            whole = flat.as_strided((len(messages), *shape), (row, *strides))
            stacked.append(whole.clone(memory_format=torch.contiguous_format))
        head = end
    return stacked


_Place = tuple[torch.dtype, tuple[int, ...], "tuple[int, ...] | None", int, int]


def _places(message: bytes, count: int) -> list[_Place] | None:
    """Returns dtype, shape, strides, begin and end of a message's tensors, if all are simple."""
    places: list[_Place] = []
    position = 0
    try:
        for _ in range(count):
            code, flags, ndim, size_bytes = _HEAD.unpack_from(message, position)
            shape = SIZES[ndim].unpack_from(message, position + _HEAD.size)
            start = position + _HEAD.size + 8 * ndim
            dtype, strides, extended = _TORCH[code], None, prod(shape)
            if flags == STRIDED:
                strides = SIZES[ndim].unpack_from(message, start)
                start, extended = start + 8 * ndim, extent(shape, strides)
            elif flags:
                return None
            if not size_bytes or extended * dtype.itemsize != size_bytes or not prod(shape):
                return None
            position = start + size_bytes
            places.append((dtype, shape, strides, start, position))
    except _MALFORMED:
        return None
    return places if position == len(message) else None


def _dtype_of(code: int) -> torch.dtype:
    """Returns a dtype that small tensors may have; raises as ``table.dtype_of`` does."""
    dtype = dtype_of(code)
    if code not in _TORCH:
        raise ProtocolError(f"a tensor of {dtype} stands in its message")
    return dtype


def _other(code: int, shape: tuple[int, ...], memory: bytearray) -> Tensor:
    """Returns a contiguous tensor of a dtype that numpy lacks."""
    dtype = _dtype_of(code)
    if prod(shape) * dtype.itemsize != len(memory):
        raise ProtocolError(f"a tensor of shape {shape} comes with {len(memory)} bytes")
    if not memory:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _strided(
    data: Any, position: int, code: int, flags: int, shape: tuple[int, ...], size_bytes: int
) -> tuple[Tensor, int]:
    """Returns a tensor that is not contiguous, and where its bytes end."""
    _check(flags, code)
    strides = SIZES[len(shape)].unpack_from(data, position)
    position += 8 * len(shape)
    memory = bytearray(data[position : position + size_bytes])
    dtype = _dtype_of(code)
    if extent(shape, strides) * dtype.itemsize != size_bytes or len(memory) != size_bytes:
        raise ProtocolError(f"a tensor of shape {shape} comes with {size_bytes} bytes")
    if max((*shape, *strides), default=0) >= INT64_LIMIT or prod(shape) >= INT64_LIMIT:
        raise ProtocolError(f"a tensor of shape {shape} has the strides {strides}")
    tensor = torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
    return tensor, position + size_bytes


def _view(
    data: Any,
    position: int,
    code: int,
    flags: int,
    shape: tuple[int, ...],
    size_bytes: int,
    index: int,
    shared: dict[int, Tensor],
) -> tuple[Tensor, int]:
    """Returns a view of memory that several tensors share, and where its bytes end."""
    _check(flags, code)
    strides = SIZES[len(shape)].unpack_from(data, position)
    position += 8 * len(shape)
    offset, bringer = _SHARED.unpack_from(data, position)
    start, position = position + _SHARED.size, position + _SHARED.size + size_bytes
    if bringer == index:
        memory = bytearray(data[start:position])
        if len(memory) != size_bytes or not memory:
            raise ProtocolError(f"shared memory of {size_bytes} bytes is cut short")
        shared[index] = torch.frombuffer(memory, dtype=torch.uint8)
    elif size_bytes:
        raise ProtocolError("a view brings memory, and is on that of another tensor")
    flat = shared[bringer]
    dtype = _dtype_of(code)
    count = flat.numel() // dtype.itemsize
    if 0 in shape or max((offset, *shape, *strides)) >= INT64_LIMIT:
        raise ProtocolError(f"a view of shape {shape} has the strides {strides}")
    if prod(shape) >= INT64_LIMIT or offset + extent(shape, strides) > count:
        raise ProtocolError(f"a view of shape {shape} leaves the memory of its message")
    whole = flat.narrow(0, 0, count * dtype.itemsize).view(dtype)
    # Detached: no view to autograd, but with the version counter of the memory.
    return whole.as_strided(shape, strides, offset).detach(), position


def _check(flags: int, code: int) -> None:
    if flags & ~_FLAGS or not flags & STRIDED:
        raise ProtocolError(f"a tensor of a message has the unknown flags {flags:#x}")
    is_right = flags & REQUIRES_GRAD and code in _DIFFERENTIABLE
    if flags & (REQUIRES_GRAD | COMPUTED) and not is_right:
        raise ProtocolError(f"a tensor of dtype {code} has the impossible flags {flags:#x}")
