"""Descriptions of tensors apart: no tensor reaches outside of the received buffers."""

from __future__ import annotations

import struct
import warnings

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.fuzz.target import Target
from torchweft.engine.codec.tensors import (
    APART,
    CODES,
    ON_DEVICE,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    STRIDED,
    describe,
    read,
    rebuild,
    with_flags,
)
from torchweft.errors import ProtocolError, SerializationError

_SIZES = ((), (64,), (64, 48), (64, 48, 1), (16, 16, 16, 16))
_BUFFERS = tuple([bytearray(size) for size in sizes] for sizes in _SIZES)
_MAY_RAISE = (ProtocolError, SerializationError)
"""``SerializationError`` for a device or dtype that only other workers have."""

warnings.filterwarnings("ignore", "ComplexHalf support is experimental")


def _lies_inside(tensor: Tensor, buffers: list[bytearray]) -> bool:
    """Returns whether a tensor lies in its storage, which is not larger than a buffer."""
    if not tensor.numel():
        return True
    extent = sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    end = (tensor.storage_offset() + extent + 1) * tensor.element_size()
    storage = tensor.untyped_storage()
    return tensor.storage_offset() >= 0 and end <= storage.nbytes() <= max(map(len, buffers))


def run(data: bytes) -> Exception | None:
    """Rebuilds the tensors of a table on the buffers that its first byte selects."""
    if not data:
        return None
    buffers, detached = _BUFFERS[data[0] % len(_BUFFERS)], data[0] >= 128
    table = memoryview(data)[1:]
    try:
        tensors, told = rebuild(read(table), buffers)
    except _MAY_RAISE as error:
        return error
    flags = told or bytes(len(tensors))
    assert len(flags) == len(tensors)
    if not detached:
        tensors = with_flags(tensors, flags)
    for tensor, flag in zip(tensors, flags, strict=True):
        assert _lies_inside(tensor, buffers), (tensor.shape, tensor.stride())
        assert tensor.requires_grad == (bool(flag & REQUIRES_GRAD) and not detached)
        assert isinstance(tensor, Parameter) == (bool(flag & PARAMETER) and not detached)
    return None


def _entry(*numbers: int, code: int, flags: int, ndim: int) -> bytes:
    return struct.pack(f"<BBBI{len(numbers)}Q", code, flags, ndim, 0, *numbers)


def seeds() -> list[bytes]:
    """Returns tables of contiguous, strided, shared, empty and differentiable tensors."""
    base = torch.zeros(16)
    described = [
        [torch.zeros(4, 4)],
        [torch.zeros(4, 4), torch.zeros(12, dtype=torch.int32)],
        [torch.zeros(4, 4).t(), torch.zeros(0, 3), torch.zeros(6, 2)],
        [base[2:], base[:4], base.view(4, 4).t()],
        [torch.zeros((), requires_grad=True), Parameter(torch.zeros(2)), torch.zeros(1)],
        [torch.zeros(1).expand(5, 5)],
    ]
    tables = [describe(tensors) for tensors in described]
    seeds = [bytes([len(buffers)]) + table for table, buffers in tables]
    wide = CODES[torch.complex128]
    entries = [
        _entry(4, 4, code=7, flags=APART, ndim=2),
        _entry(2, 2, 3, 1, code=wide, flags=STRIDED | APART, ndim=2),
        _entry(5, 2, 1, 0, code=7, flags=STRIDED | SHARED | APART, ndim=1),
        _entry(0, code=7, flags=REQUIRES_GRAD | PARAMETER, ndim=1),
        _entry(1, 256, code=7, flags=APART | ON_DEVICE, ndim=1),
        *[_entry(2, code=code, flags=APART, ndim=1) for code in CODES.values()],
    ]
    seeds += [b"\1" + entry for entry in entries] + [b"\0"]
    return seeds


TARGET = Target("tensor_table", run, seeds, length_limit=256)
