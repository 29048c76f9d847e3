"""Copies of values for a snapshot: tensors in host memory, and plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.errors import ArgumentTypeError
from torchweft.extending import has_memory
from torchweft.memory import DeviceCopies

SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
SEQUENCES = (list, tuple, set)
MAPPINGS = (dict, OrderedDict, Counter)
_Memory = tuple[Any, ...]
"""Tells the memory of a tensor, and the form in which the tensor sees it."""


class HostCopier:
    """Copies values into memory of their own, and tensors into host memory.

    Tensors that share the same memory, such as tied weights, become one copy. So use one copier
    for one value, and keep all of that value alive until the copy is complete.

    Args:
        path: The path of the value, for messages.
        devices: Copies tensors on GPUs; their copies have no content before its ``wait``. By
            default each is complete at once.
    """

    def __init__(self, path: str, devices: DeviceCopies | None = None) -> None:
        self._path = path
        self._devices = devices
        self._copies: dict[_Memory, Tensor] = {}
        self._ways: dict[type, Callable[[Any, str], Any]] = {
            **dict.fromkeys(SCALARS, lambda value, at: value),
            **dict.fromkeys(SEQUENCES, self._sequence),
            **dict.fromkeys(MAPPINGS, self._mapping),
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
            with torch._C.DisableTorchFunctionSubclass():
                if reason := _why_not(value):
                    raise ArgumentTypeError(f"{self._path}{at} is {reason}")
                return self._tensor(value)
        if isinstance(value, np.generic):
            value = value.item()
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
        if tensor.layout is not torch.strided:
            return _cloned(tensor)
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.device,
            tensor.storage_offset(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        copy = self._copies.get(memory)
        if copy is None:
            copy = self._copies[memory] = self._dense(tensor)
        return copy

    def _dense(self, tensor: Tensor) -> Tensor:
        if self._devices is None or not tensor.is_cuda:
            return _cloned(tensor)
        return self._devices.copy(_plain(tensor))


def _why_not(tensor: Tensor) -> str:
    """Returns why a snapshot cannot hold a tensor, and the remedy; empty if it can."""
    if nn.parameter.is_lazy(tensor):
        return (
            "a parameter of a lazy module, which has no values yet; call the module once before "
            "its state is saved"
        )
    if tensor.is_meta:
        return "a tensor on the device 'meta', which has no values to save"
    if tensor.is_nested:
        return "a nested tensor, which a snapshot cannot hold; save its parts as a list"
    if not has_memory(tensor):
        return (
            f"a {type(tensor).__qualname__}, which has no memory of its own; save the tensors that "
            "it is made of"
        )
    if tensor.is_quantized:
        return "a quantized tensor, which a snapshot cannot hold; save its int_repr and its scales"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"a tensor of layout {tensor.layout}, which a snapshot cannot hold; save its parts"
    return ""


def _plain(tensor: Tensor) -> Tensor:
    """Returns a tensor of torch's own class: reading another would need the code of that class."""
    own = tensor.detach()
    return own if type(own) is Tensor else own.as_subclass(Tensor)


def _cloned(tensor: Tensor) -> Tensor:
    own = _plain(tensor)
    return own.clone() if own.device.type == "cpu" else own.cpu()
