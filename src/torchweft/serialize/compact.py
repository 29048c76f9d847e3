"""Encodes small plain values as bytes and back, without pickle and without tables.

Most calls carry a few small tensors and numbers and nothing else. For these the general encoding (a
pickle with the tensors taken out, a table that describes them, their memory behind the message)
costs several times the copy of the values. Here a tuple of values becomes one run of bytes, the
tensors' memory included. Unusual values are left to the general encoding: ``encode`` returns None.

Layout, little-endian: the number of values (u8), then each as a tag (u8) and what follows it::

    NONE, TRUE, FALSE                       -
    INTEGER    i64          FLOAT   f64
    TEXT, BYTES             size u32 · the bytes (text in UTF-8)
    TUPLE, LIST             the number of values u8 · the values
    DICTIONARY              the keys, then the values, each laid out as a tuple's
    OTHER                   size u32 · bytes that the layer above makes and reads
    TENSOR, GRAD_TENSOR,    dtype u8 · dimensions u8 · size in bytes u32 · u64 a dimension · memory
    LEAF_TENSOR

A tensor that requires grad, leaf or not, may only stand at the top level: the layer above has a
placeholder for it. Decoding can do no more than make these values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import ProtocolError
from torchweft.serialize.table import SIMPLE_NDIM, SIZES

NONE, TRUE, FALSE, INTEGER, FLOAT, TEXT, BYTES, TENSOR, GRAD_TENSOR = range(9)
TUPLE, LIST, DICTIONARY, OTHER, LEAF_TENSOR = range(9, 14)

TENSOR_LIMIT_BYTES = 16 * 1024
"""Beyond it, the copies made here cost more than the tables that they save."""
_MESSAGE_LIMIT_BYTES = 64 * 1024
_COUNT_LIMIT = 255
_DEPTH_LIMIT = 8

_INTEGER = struct.Struct("<Bq")
_FLOAT = struct.Struct("<Bd")
_SIZED = struct.Struct("<BI")
_TENSOR = struct.Struct("<BBBI")
_TENSOR_BY_NDIM = tuple(struct.Struct(f"<BBBI{ndim}Q") for ndim in range(SIMPLE_NDIM + 1))
_ONE_BYTE = tuple(bytes((number,)) for number in range(256))
_INT64_MAX = (1 << 63) - 1

# Indexed by code. numpy calls 64-bit integers a long, or on other systems a long long.
_FORMATS = ("?", "B", "b", "h", "i", "q", "e", "f", "d", "F", "D")
_DTYPES = tuple([np.dtype(name) for name in _FORMATS])
_CODES = {name: code for code, name in enumerate(_FORMATS)}
_CODES |= {"l": _CODES["q"], "Zf": _CODES["F"], "Zd": _CODES["D"]}
_CONSTANTS = (None, True, False)
_SIZED_TAGS = (TEXT, BYTES, OTHER)

shared_ranges: dict[int, int] = {}
"""Start and end of every memory range that may hold tensors which the user shares with other
workers; usually empty. The layer that lends the memory registers it here. These tensors are never
copied into a message, however small they are: the receiver must get the same memory."""


def may_be_shared(address: int) -> bool:
    """Whether a tensor that begins at ``address`` may be shared."""
    return any(start <= address < end for start, end in tuple(shared_ranges.items()))


def nothing_else(value: object) -> bytes | None:
    """Returns None: the default for callers without values of their own."""


def encode(
    values: Sequence[Any],
    differentiable: list[Tensor],
    encode_other: Callable[[Any], bytes | None] = nothing_else,
) -> bytes | None:
    """Returns ``values`` as bytes; None if they need the general encoding.

    Tensors must be dense, on the CPU, contiguous and small.

    Args:
        values: The values to encode.
        differentiable: Gets the tensors that require grad, in order.
        encode_other: Called with a value of any other kind; returns its bytes, or None.
    """
    parts: list[Any] = []
    tensors: list[Tensor] = []
    containers: list[Any] = []
    if not _encode(values, parts, tensors, containers, differentiable, encode_other, 0):
        return None
    if len(tensors) > 1:
        # Tensors that share memory must stay views of one storage, which takes a table.
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if len(storages) < len(tensors):
            return None
    if len(containers) > 1 and len({id(container) for container in containers}) < len(containers):
        return None  # The receiver, too, must see one list in two places, not two lists.
    data = b"".join(parts)
    return data if len(data) <= _MESSAGE_LIMIT_BYTES else None


def _encode(
    values: Sequence[Any],
    parts: list[Any],
    tensors: list[Tensor],
    containers: list[Any],
    differentiable: list[Tensor],
    encode_other: Callable[[Any], bytes | None],
    depth: int,
) -> bool:
    """Appends the count and each value; returns False at the first unusual value.

    One inlined loop: this is most of the cost of a small call's arguments.
    """
    count = len(values)
    if count > _COUNT_LIMIT:
        return False
    parts.append(_ONE_BYTE[count])
    for value in values:
        kind = type(value)
        if kind is Tensor:
            tag = TENSOR
            if value.requires_grad:
                if depth:
                    return False
                differentiable.append(value)
                tag = LEAF_TENSOR if value.is_leaf else GRAD_TENSOR
                value = value.detach()
            if value.__dict__ or (shared_ranges and may_be_shared(value.data_ptr())):
                return False
            try:
                memory = value.numpy().data
                code = _CODES[memory.format]
            except (RuntimeError, TypeError, KeyError):
                return False  # Not on the CPU, not dense, or of a dtype that numpy lacks.
            ndim = memory.ndim
            size_bytes = memory.nbytes
            if not memory.c_contiguous or size_bytes > TENSOR_LIMIT_BYTES or ndim > SIMPLE_NDIM:
                return False
            if not size_bytes:
                return False
            parts.append(_TENSOR_BY_NDIM[ndim].pack(tag, code, ndim, size_bytes, *memory.shape))
            parts.append(memory)
            tensors.append(value)
        elif kind is int:
            if not -_INT64_MAX <= value <= _INT64_MAX:
                return False
            parts.append(_INTEGER.pack(INTEGER, value))
        elif value is None:
            parts.append(_ONE_BYTE[NONE])
        elif kind is float:
            parts.append(_FLOAT.pack(FLOAT, value))
        elif kind is bool:
            parts.append(_ONE_BYTE[TRUE if value else FALSE])
        elif kind is str:
            try:
                text = value.encode()
            except UnicodeEncodeError:
                return False
            parts.append(_SIZED.pack(TEXT, len(text)))
            parts.append(text)
        elif kind is tuple or kind is list:
            parts.append(_ONE_BYTE[TUPLE if kind is tuple else LIST])
            if kind is list:
                containers.append(value)
            if depth == _DEPTH_LIMIT or not _encode(
                value, parts, tensors, containers, differentiable, encode_other, depth + 1
            ):
                return False
        elif kind is dict:
            parts.append(_ONE_BYTE[DICTIONARY])
            containers.append(value)
            if depth == _DEPTH_LIMIT:
                return False
            for half in (tuple(value), tuple(value.values())):
                if not _encode(
                    half, parts, tensors, containers, differentiable, encode_other, depth + 1
                ):
                    return False
        elif kind is bytes and len(value) <= _MESSAGE_LIMIT_BYTES:
            parts.append(_SIZED.pack(BYTES, len(value)))
            parts.append(value)
        else:
            other = encode_other(value)
            if other is None:
                return False
            parts.append(_SIZED.pack(OTHER, len(other)))
            parts.append(other)
    return True


def _no_other(data: bytes) -> Any:
    raise ProtocolError(f"a message has a value of unknown kind: {data[:20]!r}")


def decode(
    data: bytes | bytearray | memoryview,
    position: int,
    differentiable: list[int],
    decode_other: Callable[[bytes], Any] = _no_other,
) -> list[Any]:
    """Returns the values that ``encode`` was given; tensors own their memory.

    Args:
        data: Contains the bytes that ``encode`` returned.
        position: Where in ``data`` these bytes begin; they go on to the end.
        differentiable: Gets the positions of the tensors that required grad. Former leaves require
            grad here, too; the other tensors do not.
        decode_other: Called with the bytes that ``encode_other`` returned.

    Raises:
        ProtocolError: The bytes are malformed.
    """
    size = len(data)
    if size - position > _MESSAGE_LIMIT_BYTES:
        raise ProtocolError(f"the values of a message have {size - position} bytes, too many")
    try:
        values, end = _decode(data, position, differentiable, decode_other, 0)
    except (struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the values of a message are malformed: {error}") from None
    if end != size:
        raise ProtocolError(f"the values of a message have {size - end} bytes too many")
    return values


def _decode(
    data: bytes | bytearray | memoryview,
    position: int,
    differentiable: list[int],
    decode_other: Callable[[bytes], Any],
    depth: int,
) -> tuple[list[Any], int]:
    count = data[position]
    position += 1
    values: list[Any] = []
    for _ in range(count):
        tag = data[position]
        if tag == TENSOR or tag == GRAD_TENSOR or tag == LEAF_TENSOR:  # noqa: SIM109 - a set is slow
            _, code, ndim, size_bytes = _TENSOR.unpack_from(data, position)
            shape = SIZES[ndim].unpack_from(data, position + _TENSOR.size)
            start = position + _TENSOR.size + 8 * ndim
            position = start + size_bytes
            # Copy it: one tensor must not keep the memory of a whole message.
            array = np.ndarray(shape, _DTYPES[code], bytearray(data[start:position]))
            if array.nbytes != size_bytes:
                raise ProtocolError(f"a tensor of {array.nbytes} bytes comes with {size_bytes}")
            tensor = torch.from_numpy(array)
            if tag != TENSOR:
                if depth or not (tensor.is_floating_point() or tensor.is_complex()):
                    raise ProtocolError(f"a tensor of {tensor.dtype} cannot require grad here")
                differentiable.append(len(values))
                if tag == LEAF_TENSOR:
                    tensor.requires_grad_()
            values.append(tensor)
        elif tag == INTEGER:
            values.append(_INTEGER.unpack_from(data, position)[1])
            position += _INTEGER.size
        elif tag < len(_CONSTANTS):
            values.append(_CONSTANTS[tag])
            position += 1
        elif tag == FLOAT:
            values.append(_FLOAT.unpack_from(data, position)[1])
            position += _FLOAT.size
        elif tag in _SIZED_TAGS:
            start = position + _SIZED.size
            position = start + _SIZED.unpack_from(data, position)[1]
            piece = bytes(data[start:position])
            if len(piece) != position - start:
                raise ProtocolError("a text in a message is cut short")
            if tag == OTHER:
                values.append(decode_other(piece))
            else:
                values.append(piece.decode() if tag == TEXT else piece)
        elif tag <= DICTIONARY and depth < _DEPTH_LIMIT:
            inner, position = _decode(data, position + 1, differentiable, decode_other, depth + 1)
            if tag == DICTIONARY:
                keys, (inner, position) = (
                    inner,
                    _decode(data, position, differentiable, decode_other, depth + 1),
                )
                values.append(dict(zip(keys, inner, strict=True)))
            else:
                values.append(inner if tag == LIST else tuple(inner))
        else:
            raise ProtocolError(f"a value of a message has the unknown tag {tag}")
    return values, position
