"""Parts of a snapshot: entries as JSON, and their tensors by name. Nothing is pickled.

Tensors are named after their place in the state, as in ``model:weight`` and
``optimizer/state/model:weight/exp_avg``. Whatever is no tensor is JSON. There, an object with one
key that begins with ``$`` stands for a value that JSON has no form for: ``{"$tensor":
"model:weight"}`` is a tensor of the part, ``{"$tuple": [1, 2]}`` a tuple.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.checkpoint.kinds import MAPPINGS, MODULE, PARAMETER, SEQUENCES, Content
from torchweft.errors import ArgumentTypeError
from torchweft.memory import DeviceCopies, has_memory

FILE_TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that every reader of safetensors knows, by their names there. Tensors of others are
kept as bytes."""
_EXACT: Final = (type(None), bool, str)
"""The types whose values JSON has a form for."""


class Part(NamedTuple):
    """Encoded entries.

    Attributes:
        head: By path, the kind and the state as JSON.
        tensors: By name, contiguous tensors in host memory, of ``FILE_TYPES``.
    """

    head: dict[str, Any]
    tensors: dict[str, Tensor]

    def kinds(self) -> dict[str, str]:
        """Returns the kind of each entry, by path."""
        return {path: item["kind"] for path, item in self.head.items()}

    def content(self, wanted: Iterable[str] | None = None) -> Content:
        """Returns entries, by default all; see ``decode_part``."""
        return decode_part(self.head, wanted or self.head, self.tensors.__getitem__)


class Encoder:
    """Encodes entries, with copies of their tensors in host memory.

    Args:
        devices: Copies tensors on GPUs; ``finish`` is called after its ``wait``. By default each is
            copied at once.
        part: The entries to which others are added.
    """

    def __init__(self, devices: DeviceCopies | None = None, part: Part | None = None) -> None:
        self._devices = devices
        self._head, self._tensors = Part({}, {}) if part is None else part
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, kind: str, states: dict[str, Any]) -> None:
        """Adds entries of a kind. Tensors in them that share their memory are copied once.

        Args:
            kind: The kind.
            states: By path, tensors and plain values.

        Raises:
            ArgumentTypeError: A state contains an object of another type; says where.
        """
        self._names.clear()  # Memory of other states may be that of these now.
        for path, state in states.items():
            if kind in (MODULE, PARAMETER):  # The names of their tensors are the shorter.
                separator = ":" if kind == MODULE else "/"
                node = {
                    key: self._encode(each, path, path)
                    for key, each in state.items()
                    if key != "state"
                }
                node["state"] = self._encode(state["state"], path, path, separator)
            else:
                node = self._encode(state, path.lstrip("/"), path)
            self._head[path] = {"kind": kind, "state": node}

    def finish(self) -> Part:
        """Returns the part."""
        return Part(self._head, {name: _as_stored(each) for name, each in self._tensors.items()})

    def _encode(self, value: Any, name: str, at: str, separator: str = "/") -> Any:
        """Returns a value as JSON.

        Args:
            value: Tensors and plain values.
            name: The name of the value, from which those of its tensors are made.
            at: Where the value is, for messages.
            separator: Stands between the name and a key.
        """
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                if reason := _why_not(value):
                    raise ArgumentTypeError(f"{at} is {reason}")
                return self._tensor(value, name)
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if kind in _EXACT:
            return value
        if kind is int:  # Decimal numbers of many digits are slow, and limited.
            return value if value.bit_length() <= 64 else {"$int": hex(value)}
        if kind is float:
            return value if isfinite(value) else {"$float": str(value)}
        if kind in SEQUENCES:
            items = [
                self._encode(each, f"{name}/{place}", f"{at}[{place}]")
                for place, each in enumerate(value)
            ]
            return items if kind is list else {f"${kind.__name__}": items}
        if kind in MAPPINGS:
            pairs = [
                [
                    self._encode(key, name, f"{at}, a key,"),
                    self._encode(each, f"{name}{separator}{key}", f"{at}[{key!r}]"),
                ]
                for key, each in value.items()
            ]
            is_object = all(type(key) is str and not key.startswith("$") for key in value)
            return dict(pairs) if kind is dict and is_object else {f"${kind.__name__}": pairs}
        if kind not in _FORMS:
            raise ArgumentTypeError(
                f"{at} is a {kind.__module__}.{kind.__qualname__}, which a snapshot cannot hold; "
                "give it tensors, numbers, strings, and lists, tuples, sets and dicts of them"
            )
        plain, _ = _FORMS[kind]
        return {f"${kind.__name__}": plain(value)}

    def _tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        if tensor.layout is torch.sparse_coo:
            tensor = _cloned(tensor).coalesce()
            parts = [tensor.indices(), tensor.values(), tensor.shape]
            return {"$sparse": self._encode(parts, name, name)}
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.device,
            tensor.storage_offset(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if memory not in self._names:
            self._names[memory] = self._add(tensor, name)
        known = self._names[memory]
        copy = self._tensors[known]
        form: dict[str, Any] = {"$tensor": known}
        if not copy.is_contiguous():
            form["stride"] = list(copy.stride())
        if copy.dtype not in FILE_TYPES:
            form["dtype"] = _name_of(copy.dtype)
        return form

    def _add(self, tensor: Tensor, at: str) -> str:
        """Adds the copy of a tensor; returns its name."""
        name, count = at, 1
        while name in self._tensors or name == "__metadata__":  # which readers take for theirs
            count += 1
            name = f"{at}#{count}"
        if self._devices is None or not tensor.is_cuda:
            self._tensors[name] = _cloned(tensor)
        else:
            self._tensors[name] = self._devices.copy(_plain(tensor))
        return name


def host_copy(path: str, value: Any) -> Any:
    """Returns a copy of tensors and plain values in host memory; ``path`` is for messages."""
    encoder = Encoder()
    encoder.add("", {path: value})
    return encoder.finish().content()[path]["state"]


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


def _as_stored(tensor: Tensor) -> Tensor:
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole if whole.dtype in FILE_TYPES else whole.unsqueeze(-1).view(torch.uint8)


# Decoding


def decode_part(
    head: dict[str, Any], wanted: Iterable[str], tensor_of: Callable[[str], Tensor]
) -> Content:
    """Returns the wanted entries of a part.

    Args:
        head: The head of the part.
        wanted: Paths of entries.
        tensor_of: Returns a tensor of the part by its name.

    Raises:
        ValueError: The head was not made by an ``Encoder``. Other errors are possible as well.
    """
    return {
        path: {"kind": head[path]["kind"], "state": _decode(head[path]["state"], tensor_of)}
        for path in wanted
    }


def _decode(node: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(each, tensor_of) for each in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), "")
    if not tag:
        return {key: _decode(each, tensor_of) for key, each in node.items()}
    if tag == "$tensor":
        return _tensor_of(node, tensor_of)
    if tag not in _MAKERS:
        raise ValueError(f"it has a value of the unknown form {tag}")
    return _MAKERS[tag](_decode(node[tag], tensor_of))


def _tensor_of(node: dict[str, Any], tensor_of: Callable[[str], Tensor]) -> Tensor:
    tensor = tensor_of(node["$tensor"])
    if "dtype" in node:
        tensor = tensor.view(_type_of(node["dtype"])).squeeze(-1)
    if "stride" in node:
        spread = torch.empty_strided(tensor.shape, node["stride"], dtype=tensor.dtype)
        tensor = spread.copy_(tensor)
    return tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it has the unknown type {name}")
    return found


_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    torch.Size: (list, torch.Size),
    complex: (str, complex),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.dtype: (_name_of, _type_of),
    torch.device: (str, torch.device),
}
"""The types that JSON has no form for: how values become plainer ones, and are made of them."""

_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{f"${kind.__name__}": make for kind, (_, make) in _FORMS.items()},
    "$tuple": tuple,
    "$set": set,
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda pairs: Counter(dict(pairs)),
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$sparse": lambda parts: torch.sparse_coo_tensor(*parts, check_invariants=True).coalesce(),
}
