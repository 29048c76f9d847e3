"""The tensor table: no tensor that it makes reaches outside of the received buffers."""

from __future__ import annotations

import struct
import warnings

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.fuzz.target import Target
from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize.table import (
    CODES,
    ENTRY,
    HEADER,
    NO_BUFFER,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    STRIDED,
)
from torchweft.serialize.tensors import describe, grad_flags, rebuild

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
        tensors = rebuild(table, buffers, detached=detached)
        flags = grad_flags(table)
    except _MAY_RAISE as error:
        return error
    assert len(flags) == len(tensors)
    for tensor, flag in zip(tensors, flags, strict=True):
        assert _lies_inside(tensor, buffers), (tensor.shape, tensor.stride())
        assert tensor.requires_grad == (bool(flag & REQUIRES_GRAD) and not detached)
        assert isinstance(tensor, Parameter) == (bool(flag & PARAMETER) and not detached)
    return None


def _entry(*numbers: int, code: int, flags: int, ndim: int, buffer: int, device: int = 0) -> bytes:
    head = ENTRY.pack(code, flags, ndim, device, 255, buffer)
    return head + struct.pack(f"<{len(numbers)}Q", *numbers)


def _table(buffers: int, *entries: bytes) -> bytes:
    return bytes([buffers]) + HEADER.pack(len(entries), buffers, 1) + b"".join(entries)


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
    seeds += [
        _table(1, _entry(4, 4, code=7, flags=0, ndim=2, buffer=0)),
        _table(1, _entry(2, 2, 1, 3, 1, code=wide, flags=STRIDED, ndim=2, buffer=0)),
        _table(1, _entry(5, 2, 1, code=7, flags=STRIDED | SHARED, ndim=1, buffer=0)),
        _table(0, _entry(0, code=7, flags=REQUIRES_GRAD | PARAMETER, ndim=1, buffer=NO_BUFFER)),
        _table(1, _entry(1, code=7, flags=0, ndim=1, buffer=0, device=1)),
        bytes([0]),
    ]
    seeds += [_table(1, _entry(2, code=code, flags=0, ndim=1, buffer=0)) for code in CODES.values()]
    return seeds


TARGET = Target("tensor_table", run, seeds, length_limit=256)
