"""Small tensors as bytes inside their message, without tables and channels.

A table and a channel for each tensor cost several times the copy of a small tensor. So the tensors
of most messages stand in the message itself, each with its memory behind its description.

Layout, little-endian, for each tensor until the end::

    dtype u8 · flags u8 · dimensions u8 · size in bytes u32 · u64 a dimension
    with the flag STRIDED: u64 a stride, in elements
    memory

Views that share a storage must arrive as views of one storage, which takes a table. So do tensors
on other devices, and the large ones, which a channel moves faster.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import ProtocolError, WeftError
from torchweft.serialize.extents import flatten
from torchweft.serialize.table import (
    CODES,
    COMPUTED,
    INT64_LIMIT,
    PARAMETER,
    REQUIRES_GRAD,
    SIMPLE_NDIM,
    SIZES,
    STRIDED,
    dtype_of,
    extent,
)

LIMIT_BYTES = 64 * 1024
"""All tensors of a message together, with their descriptions; above it, channels are faster."""

_HEAD = struct.Struct("<BBBI")
_HEADS = tuple(struct.Struct(f"<BBBI{count}Q") for count in range(2 * SIMPLE_NDIM + 1))
_FLAGS = REQUIRES_GRAD | PARAMETER | COMPUTED | STRIDED

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
_NUMPY = {
    CODES[dtype]: torch.empty(0, dtype=dtype).numpy().dtype for dtype in set(_DTYPES.values())
}

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

shared_ranges: dict[int, int] = {}
"""Start and end of every memory range that may hold tensors which the user shares with other
workers; usually empty. The layer that lends the memory registers it here. These tensors are never
copied into a message, however small they are: the receiver must get the same memory."""


def may_be_shared(address: int) -> bool:
    """Whether a tensor that begins at ``address`` may be shared."""
    return any(start <= address < end for start, end in tuple(shared_ranges.items()))


def encode(tensors: Sequence[Tensor]) -> tuple[list[Any], int] | None:
    """Returns the bytes of ``tensors`` in parts, and their size; None if they need tables.

    One inlined loop: this is most of the cost of a small call's tensors.

    Args:
        tensors: Tensors of any kind.
    """
    parts: list[Any] = []
    size_bytes = 0
    for tensor in tensors:
        flags = 0
        if tensor.requires_grad:
            flags = REQUIRES_GRAD if tensor.is_leaf else REQUIRES_GRAD | COMPUTED
        if type(tensor) is not Tensor:
            flags |= PARAMETER
        if flags:
            tensor = tensor.detach()
        try:
            if shared_ranges and may_be_shared(tensor.data_ptr()):
                return None
            memory: Any = tensor.numpy().data
            code = _CODES[memory.format]
        except (RuntimeError, TypeError, KeyError, ValueError):
            return None  # Not on the CPU, not dense, or of a dtype that numpy lacks.
        ndim = memory.ndim
        if ndim > SIMPLE_NDIM:
            return None
        sizes = memory.shape
        if memory.c_contiguous:
            count = memory.nbytes
        elif memory.nbytes > LIMIT_BYTES and 0 not in memory.strides:
            return None  # Tables need no copy of it, or make their own.
        else:
            flat, strides = flatten(tensor)
            memory = flat.numpy().data
            count = memory.nbytes
            if strides is not None:
                flags |= STRIDED
                sizes += strides
        size_bytes += count + 7 + 8 * len(sizes)
        if size_bytes > LIMIT_BYTES:
            return None
        parts.append(_HEADS[len(sizes)].pack(code, flags, ndim, count, *sizes))
        if count:
            parts.append(memory)
    if len(tensors) > 1:
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if len(storages) < len(tensors):
            return None
    return parts, size_bytes


def decode(data: bytes | bytearray | memoryview, position: int) -> tuple[list[Tensor], list[int]]:
    """Returns the tensors, each with memory of its own and without grad, and their flags.

    Args:
        data: A message.
        position: Where in ``data`` the tensors begin; they go on to the end.

    Returns:
        The tensors, and the ``REQUIRES_GRAD``, ``PARAMETER`` and ``COMPUTED`` of each; no flags if
        no tensor has any.

    Raises:
        ProtocolError: The bytes are malformed.
        SerializationError: This worker lacks a dtype.
    """
    tensors: list[Tensor] = []
    all_flags: list[int] = []
    end = len(data)
    if end - position > LIMIT_BYTES:
        raise ProtocolError(f"the tensors of a message have {end - position} bytes, too many")
    try:
        while position < end:
            code, flags, ndim, size_bytes = _HEAD.unpack_from(data, position)
            position += 7
            shape = SIZES[ndim].unpack_from(data, position)
            position += 8 * ndim
            if flags:
                tensor, position = _unusual(data, position, code, flags, shape, size_bytes)
                flags &= ~STRIDED
                if flags or all_flags:
                    all_flags += [0] * (len(tensors) - len(all_flags))
                    all_flags.append(flags)
                tensors.append(tensor)
                continue
            start, position = position, position + size_bytes
            # Copy it: one tensor must not keep the memory of a whole message.
            memory = bytearray(data[start:position])
            kind = _NUMPY[code]
            if ndim == 1 and size_bytes:
                tensor = torch.frombuffer(memory, dtype=dtype_of(code))
                is_whole = shape[0] * kind.itemsize == size_bytes
            else:
                array = np.ndarray(shape, kind, memory)
                tensor = torch.from_numpy(array)
                is_whole = array.nbytes == size_bytes
            if not is_whole or len(memory) != size_bytes:
                raise ProtocolError(f"a tensor of shape {shape} comes with {size_bytes} bytes")
            tensors.append(tensor)
            if all_flags:
                all_flags.append(0)
    except WeftError:
        raise
    except _MALFORMED as error:
        raise ProtocolError(f"the tensors of a message are malformed: {error}") from None
    return tensors, all_flags


def _unusual(
    data: Any, position: int, code: int, flags: int, shape: tuple[int, ...], size_bytes: int
) -> tuple[Tensor, int]:
    """Returns a tensor that required grad or is strided, and where its bytes end."""
    if flags & ~_FLAGS:
        raise ProtocolError(f"a tensor of a message has the unknown flags {flags:#x}")
    strides: tuple[int, ...] | None = None
    if flags & STRIDED:
        strides = SIZES[len(shape)].unpack_from(data, position)
        position += 8 * len(shape)
    memory = bytearray(data[position : position + size_bytes])
    kind = _NUMPY[code]
    needed = (prod(shape) if strides is None else extent(shape, strides)) * kind.itemsize
    if needed != size_bytes or len(memory) != size_bytes:
        raise ProtocolError(f"a tensor of shape {shape} comes with {size_bytes} bytes")
    if strides is None:
        tensor = torch.from_numpy(np.ndarray(shape, kind, memory))
    else:
        if max((*shape, *strides), default=0) >= INT64_LIMIT or not prod(shape) < INT64_LIMIT:
            raise ProtocolError(f"a tensor of shape {shape} has the strides {strides}")
        flat = torch.from_numpy(np.ndarray((size_bytes // kind.itemsize,), kind, memory))
        tensor = flat.as_strided(shape, strides)
    if flags & (REQUIRES_GRAD | COMPUTED):
        may_require_grad = tensor.is_floating_point() or tensor.is_complex()
        if not (flags & REQUIRES_GRAD and may_require_grad):
            raise ProtocolError(f"a tensor of {tensor.dtype} has the impossible flags {flags:#x}")
    return tensor, position + size_bytes
