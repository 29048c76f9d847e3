"""Tensors inside of messages: bytes decode to tensors that own them, and these encode again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.fuzz.memory import at_end_of, exact_memory
from tests.fuzz.target import Bare, Target
from torchweft.engine.codec.tensors import (
    COMPUTED,
    PARAMETER,
    REQUIRES_GRAD,
    SHARED,
    decode_tensors,
    encode_tensors,
)
from torchweft.errors import ProtocolError, SerializationError
from torchweft.native import native

_LENGTH_LIMIT = 512
_MAY_RAISE = (ProtocolError, SerializationError)
"""``SerializationError`` for a dtype that only other workers have."""


def _check(tensor: Tensor, flag: int) -> None:
    if flag & (REQUIRES_GRAD | COMPUTED):
        assert tensor.is_floating_point() or tensor.is_complex()
    assert not flag & ~(REQUIRES_GRAD | PARAMETER | COMPUTED | SHARED)
    if not tensor.numel():
        return
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in pairs)
    held = tensor.untyped_storage().nbytes()
    assert end * tensor.element_size() <= held, (tensor.shape, tensor.stride())


def _as_sent(tensor: Tensor, flag: int) -> Tensor:
    """Returns a tensor as it was at its sender."""
    if flag & SHARED:
        return tensor  # A flag would take it out of the shared memory.
    if flag & PARAMETER:
        return Parameter(tensor, bool(flag & REQUIRES_GRAD))
    if flag & REQUIRES_GRAD:
        tensor.requires_grad_()
    return tensor.view_as(tensor) if flag & COMPUTED else tensor


def _trip(data: bytes) -> bytes | None:
    tensors, flags = decode_tensors(data, 0)
    assert len(flags) in (0, len(tensors))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    assert sum(storage.nbytes() for storage in storages.values()) <= len(data)
    for tensor, flag in zip(tensors, flags or [0] * len(tensors), strict=True):
        _check(tensor, flag)
    sent = [_as_sent(*each) for each in zip(tensors, flags or [0] * len(tensors), strict=True)]
    encoded = encode_tensors(sent)
    if encoded is None:  # Two of them are empty, or a large expanded one is copied.
        return None
    return encoded[0]


def run(data: bytes) -> Exception | None:
    """Decodes tensors, encodes them, and does both again."""
    try:
        once = _trip(data)
    except _MAY_RAISE as error:
        return error
    if once is not None:
        assert _trip(once) == once
    return None


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """Yields the native decoder."""
    memory = exact_memory(_LENGTH_LIMIT)

    def decode_natively(data: bytes) -> bool:
        assert native is not None
        return native.decode_tensors(at_end_of(memory, data), 0) is not None

    yield decode_natively


def seeds() -> list[bytes]:
    """Returns tensors of every dtype, shape and flag."""
    leaf = torch.ones(2, requires_grad=True)
    table = torch.arange(12.0).reshape(3, 4)
    dtypes = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
    dtypes += ("uint16", "uint32", "uint64", "complex64", "complex128")
    lists: list[list[Tensor]] = [
        [],
        [torch.ones(1, 2, dtype=getattr(torch, name)) for name in dtypes],
        [torch.ones(()), torch.ones(3), torch.ones((1,) * 8), torch.empty(0, 3)],
        [table, table.t(), table[1:]],
        [leaf, torch.zeros(1), leaf * 2, Parameter(torch.ones(1)), torch.ones(2, 2)],
        [Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False), torch.ones(1)],
        [table.t(), torch.ones(1).expand(5, 5), torch.arange(10)[::3]],
        [(leaf * 2).expand(3, 2), torch.ones(2, 3).t()],
    ]
    encoded = [encode_tensors(tensors) for tensors in lists]
    return [each[0] for each in encoded if each is not None]


TARGET = Target(
    "inline", run, seeds, length_limit=_LENGTH_LIMIT, bare=None if native is None else bare
)
