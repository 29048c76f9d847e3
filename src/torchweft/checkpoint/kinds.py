"""The kinds of values that a snapshot can hold, and how each kind is copied and put back."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft.checkpoint.device_copies import DeviceCopies
from torchweft.engine.codec.reducers import has_memory
from torchweft.errors import ArgumentTypeError
from torchweft.nn.remote_module import local_modules
from torchweft.optim import states
from torchweft.optim.local import load_exactly

# Plain values, which need no code to read

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_PLACE = tuple[Any, ...]
_INT_BITS = 255 * 8 - 1
"""The longest integer that ``torch.load`` reads without running code, in bits beside the sign."""


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


def in_base_form(value: Any) -> Any:
    """Returns a dict or list with the entries of a value of a subclass, such as a defaultdict.

    Its entries are saved, and put back into the value of the subclass, which stays what it is.
    """
    if isinstance(value, dict) and type(value) not in _MAPPINGS:
        return dict(value)
    if isinstance(value, list) and type(value) is not list:
        return list(value)
    return value


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
        self._copies: dict[_PLACE, Tensor] = {}
        self._ways: dict[type, Callable[[Any, str], Any]] = {
            **dict.fromkeys(_SCALARS, lambda value, at: value),
            **dict.fromkeys([list, tuple, set], self._sequence),
            **dict.fromkeys(_MAPPINGS, self._mapping),
            torch.Size: lambda value, at: value,
            int: self._int,
            bytes: self._bytes,
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

    def _int(self, value: int, at: str) -> int:
        if value.bit_length() > _INT_BITS:
            raise ArgumentTypeError(
                f"{self._path}{at} is an int of {value.bit_length():,} bits, and a snapshot holds "
                f"at most {_INT_BITS:,}; write it as a string"
            )
        return value

    def _bytes(self, value: bytes, at: str) -> bytes:
        if not value:
            raise ArgumentTypeError(
                f"{self._path}{at} is b'', which a snapshot cannot hold; use None or ''"
            )
        return value

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
            copy = self._copies[place] = self._dense(tensor)
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
    return ""


def _plain(tensor: Tensor) -> Tensor:
    """Returns a tensor of torch's own class: reading another would need the code of that class."""
    own = tensor.detach()
    return own if type(own) is Tensor else own.as_subclass(Tensor)


def _cloned(tensor: Tensor) -> Tensor:
    own = _plain(tensor)
    return own.clone() if own.device.type == "cpu" else own.cpu()


# Kinds

MODULE, TENSOR, GENERATOR, OBJECT = "module", "tensor", "generator", "object"
DATA = "data"
"""A dict or list behind a reference: its content is replaced, and it stays the same object."""
VALUE = "value"
"""A plain value of the driver's state: the content of a dict or list is replaced; any other value
is itself replaced in the state."""


class Differences(NamedTuple):
    """How a snapshot, or an entry of it, differs from the state; each difference with its path."""

    missing: list[str]
    unexpected: list[str]
    differing: list[str]


def kind_of(path: str, value: Any, *, is_remote: bool) -> str:
    """Returns the kind of a value.

    Args:
        path: Its path in the state, for messages.
        value: A value of this worker.
        is_remote: Whether the state has a reference to it, rather than the value itself.

    Raises:
        ArgumentTypeError: Such a value cannot be restored.
    """
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, Tensor):
        return TENSOR
    if isinstance(value, torch.Generator):
        return GENERATOR
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return OBJECT
    if not is_remote:
        return VALUE
    if isinstance(value, (dict, list)):
        return DATA
    raise ArgumentTypeError(
        f"{path} is a reference to a {type(value).__name__}, which cannot be changed in place when "
        "it is restored; refer to a module, a tensor, a dict, a list, a torch.Generator or "
        "something with state_dict and load_state_dict"
    )


def check_whole(path: str, value: Any) -> None:
    """Refuses a module of which its ``state_dict`` has a part only.

    A module within it says so by an attribute ``weft_saved_by``: what it lacks, and how that is
    saved; the attribute is empty while it is saved so.

    Raises:
        ArgumentTypeError: It is such a module.
    """
    for each in local_modules(value) if isinstance(value, nn.Module) else ():
        lacks = getattr(each, "weft_saved_by", "")
        if lacks:
            raise ArgumentTypeError(
                f"{path} is a {type(value).__qualname__}, whose state_dict lacks {lacks}"
            )


def take(path: str, kind: str, value: Any, devices: DeviceCopies | None = None) -> Any:
    """Returns a copy of the state of a value: tensors in host memory, and plain values.

    Args:
        path: Its path, for messages.
        kind: Its kind.
        value: The value.
        devices: Copies tensors on GPUs, see ``HostCopier``.

    Raises:
        ArgumentTypeError: The state contains an object of another type; says where.
    """
    copier = HostCopier(path, devices)
    if kind == MODULE:
        with torch.no_grad():
            state = value.state_dict()
        metadata = dict(getattr(state, "_metadata", {}))
        return {"state": copier.copy(dict(state)), "metadata": copier.copy(metadata)}
    if kind == GENERATOR:
        return value.get_state().cpu()
    return copier.copy(value.state_dict() if kind == OBJECT else in_base_form(value))


def differences(path: str, kind: str, value: Any, state: Any) -> Differences:
    """Returns the differences that prevent putting a saved state into a value.

    An optimizer has to have as many parameters in each group as the saved one. Weft's own objects
    have a method ``weft_differences``. Any other object with ``load_state_dict`` checks its state
    itself, when it loads it.
    """
    own = getattr(value, "weft_differences", None)
    if kind == OBJECT and own is not None:
        return Differences([], [], own(path, state))
    if kind == OBJECT and isinstance(value, Optimizer):
        found = states.differences(value, states.lineage(type(value)), state)
        return Differences([], [], [f"{path}: {text}" for text in found])
    if kind == TENSOR:
        return Differences([], [], _of_tensors(path, state, value))
    if kind != MODULE:
        return Differences([], [], [])
    saved = state["state"]
    with torch.no_grad():
        present = value.state_dict()
    return Differences(
        [f"{path}:{key}" for key in present if key not in saved],
        [f"{path}:{key}" for key in saved if key not in present],
        [
            text
            for key in present
            if key in saved
            for text in _of_tensors(f"{path}:{key}", saved[key], present[key])
        ],
    )


def put(kind: str, value: Any, state: Any, *, strict: bool) -> None:
    """Puts a saved state into a value.

    Args:
        kind: The kind of the value.
        value: The value; it stays the same object.
        state: The result of ``take`` for such a value.
        strict: Whether a module must have exactly the keys that the state has.
    """
    with torch.no_grad():
        if kind == MODULE:
            loaded: Any = OrderedDict(state["state"])
            loaded._metadata = OrderedDict(state["metadata"])  # versions, which some modules check
            value.load_state_dict(loaded, strict=strict)
        elif kind == TENSOR:
            value.copy_(state)
        elif kind == GENERATOR:
            value.set_state(state)
        elif kind == OBJECT and isinstance(value, Optimizer):
            load_exactly(value, state)
        elif kind == OBJECT:
            value.load_state_dict(state)
        else:
            refill(value, state)


def refill(value: Any, state: Any) -> None:
    """Replaces the content of a dict or list, which stays the same object.

    A tensor goes to the device of the tensor whose place it takes, and to the CPU if there is none.
    """
    state = _on_devices_of(value, state)
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    else:
        value[:] = state


def _on_devices_of(present: Any, saved: Any) -> Any:
    if isinstance(saved, Tensor):
        return saved.to(present.device) if isinstance(present, Tensor) else saved
    if isinstance(saved, dict) and isinstance(present, dict):
        placed = type(saved)()
        for key, item in saved.items():
            placed[key] = _on_devices_of(present.get(key), item)
        return placed
    if type(saved) in (list, tuple) and isinstance(present, (list, tuple)):
        pairs = itertools.zip_longest(present[: len(saved)], saved)
        return type(saved)(_on_devices_of(*pair) for pair in pairs)
    return saved


def _of_tensors(path: str, saved: Any, present: Any) -> list[str]:
    """Returns how a saved tensor differs from the tensor that is to have its values."""
    if not isinstance(saved, Tensor) or not isinstance(present, Tensor):
        return []
    if nn.parameter.is_lazy(present):  # It has no shape before it is used or loaded.
        return []
    found = []
    if saved.shape != present.shape:
        shapes = tuple(saved.shape), tuple(present.shape)
        found.append(f"{path} has shape {shapes[0]} in the snapshot and {shapes[1]} here")
    if saved.dtype != present.dtype:  # torch would convert the values, and round or cut them.
        found.append(f"{path} has type {saved.dtype} in the snapshot and {present.dtype} here")
    return found


# The random number generators of a worker: of Python, NumPy and PyTorch


def take_random() -> dict[str, Any]:
    """Returns the states of this process's generators."""
    numpy_state: Any = np.random.get_state(legacy=False)
    states = {
        "python": random.getstate(),
        "numpy": _with_key(numpy_state, numpy_state["state"]["key"].tolist()),
        "torch": torch.get_rng_state(),
    }
    # If CUDA is not initialized, asking would make the process use a device that it does not use.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [
            torch.cuda.get_rng_state(device).cpu() if _is_in_use(device) else None
            for device in range(torch.cuda.device_count())
        ]
    return states


def _is_in_use(device: int) -> bool:
    """Whether this process has used a GPU; where torch does not tell, whether it may have."""
    has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or has_context(device)


def put_random(states: dict[str, Any]) -> None:
    """Sets the generators of this process to saved states.

    States of GPUs that this process does not have are left out.
    """
    random.setstate(states["python"])
    key = np.asarray(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(_with_key(states["numpy"], key))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            if state is not None:
                torch.cuda.set_rng_state(state, device)


def _with_key(numpy_state: dict[str, Any], key: Any) -> dict[str, Any]:
    return {**numpy_state, "state": {**numpy_state["state"], "key": key}}
