"""Helpers for the tests of this folder: round trips through bytes, and tensors for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.engine.codec.objects import pack, unpack
from torchweft.engine.codec.tensors import as_memory, describe, read, rebuild, with_flags


def copies(buffers: Sequence[Tensor]) -> list[bytearray]:
    """Returns buffers as they arrive at a receiver: new memory with the same bytes."""
    return [bytearray(as_memory(buffer)) for buffer in buffers]


def tensor_trip(*tensors: Tensor) -> list[Tensor]:
    table, buffers = describe(tensors)
    return with_flags(*rebuild(read(table), copies(buffers)))


def object_trip(value: Any, main_by_name: bool = True) -> Any:
    packed = pack(value, main_by_name=main_by_name)
    tensors = tensor_trip(*packed.tensors)
    return unpack(packed.payload, tensors, packed.externals)


def raw(tensor: Tensor) -> bytes:
    """Returns the elements as bytes, so that NaN equals NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 1:
        plain = plain.view(torch.uint8)  # torch cannot copy every one-byte dtype
    return bytes(as_memory(plain.contiguous().view(-1)))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns a tensor of random bits, which may include NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, limit, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)
