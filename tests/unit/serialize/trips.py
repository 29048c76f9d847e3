"""Helpers for the tests of this folder: a round trip through bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.serialize.objects import pack, unpack
from torchweft.serialize.tensors import as_memory, describe, rebuild


def copies(buffers: Sequence[Tensor]) -> list[bytearray]:
    """Returns buffers as they arrive at a receiver: new memory with the same bytes."""
    return [bytearray(as_memory(buffer)) for buffer in buffers]


def tensor_trip(*tensors: Tensor, **options: Any) -> list[Tensor]:
    table, buffers = describe(tensors)
    return rebuild(table, copies(buffers), **options)


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
