"""The values that a snapshot may contain: tensors and plain values, which need no code to read."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import ArgumentTypeError

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_PLACE = tuple[Any, ...]


def is_plain(value: object) -> bool:
    """Whether a value consists of plain values only; tensors are not plain."""
    kind = type(value)
    if kind in _SCALARS or isinstance(value, np.generic):
        return True
    if kind in _SEQUENCES:
        return all(is_plain(item) for item in value)  # type: ignore[attr-defined]
    if kind in _MAPPINGS:
        return all(is_plain(k) and is_plain(v) for k, v in value.items())  # type: ignore[attr-defined]
    return False


class HostCopier:
    """Copies values into memory of their own, and tensors into host memory.

    Tensors that share the same memory, such as tied weights, become one copy. So use one copier
    for one value, and keep all of that value alive until the copy is complete.

    Args:
        path: The path of the value, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._copies: dict[_PLACE, Tensor] = {}
        self._ways: dict[type, Callable[[Any, str], Any]] = {
            **dict.fromkeys(_SCALARS, lambda value, at: value),
            **dict.fromkeys([list, tuple, set], self._sequence),
            **dict.fromkeys(_MAPPINGS, self._mapping),
            torch.Size: lambda value, at: value,
        }

    def copy(self, value: Any, at: str = "") -> Any:
        """Returns a copy of a value.

        Args:
            value: Tensors and plain values.
            at: Where the value is, for messages.

        Raises:
            ArgumentTypeError: The value contains an object of another type; says where.
        """
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.generic):
            return value.item()
        way = self._ways.get(type(value))
        if way is None:
            raise ArgumentTypeError(
                f"{self._path}{at} is a {type(value).__module__}.{type(value).__qualname__}, which "
                "a snapshot cannot hold; give it tensors, numbers, strings, and lists, tuples, "
                "sets and dicts of them"
            )
        return way(value, at)

    def _sequence(self, value: Any, at: str) -> Any:
        return type(value)(self.copy(item, f"{at}[{place}]") for place, item in enumerate(value))

    def _mapping(self, value: Any, at: str) -> Any:
        copied = type(value)()
        for key, item in value.items():
            copied[self.copy(key, f"{at}, a key,")] = self.copy(item, f"{at}[{key!r}]")
        return copied

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return _cloned(tensor)
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.device,
            tensor.storage_offset(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        copy = self._copies.get(place)
        if copy is None:
            copy = self._copies[place] = _cloned(tensor)
        return copy


def _cloned(tensor: Tensor) -> Tensor:
    own = tensor.detach()
    return own.clone() if own.device.type == "cpu" else own.cpu()
