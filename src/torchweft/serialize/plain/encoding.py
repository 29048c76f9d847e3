"""Encodes values as plain payloads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from torchweft.errors import SerializationError, WeftError
from torchweft.serialize import functions
from torchweft.serialize.plain import tags
from torchweft.serialize.reducers import reduce_tensor
from torchweft.serialize.registry import rebuilds_plain

TAKES = (
    "None, bool, int, float, complex, str, bytes, lists, tuples, sets and dicts of them, tensors, "
    "RRefs, torch's dtypes, devices and sizes, and functions and classes that it has registered"
)

_SIZE_LIMIT = 1 << 32
_DENSE_ADVICE = "send its dense equivalent, as tensor.to_dense() or tensor.dequantize()"
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_NAMED_TYPES = (FunctionType, BuiltinFunctionType, type, OpOverload, OpOverloadPacket)
_SCRIPT_FUNCTION: Any = torch.jit.ScriptFunction


class Encoder:
    """Encodes one value, and keeps the objects that stay outside the payload.

    Args:
        main_by_name: Whether the receiver runs the same main program.
        external_types: Classes whose objects stay outside, like tensors.

    Attributes:
        tensors: The tensors in order of first appearance, each once.
        externals: The other objects that stay outside, in the same way.
    """

    def __init__(self, main_by_name: bool, external_types: tuple[type, ...]) -> None:
        self._main_by_name = main_by_name
        self._external_types = external_types
        self._parts: list[bytes] = [bytes((tags.MARK,))]
        self._containers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # An id is unique only while its object lives.
        self._depth = 0
        self.tensors: list[Tensor] = []
        self.externals: list[object] = []

    def encode(self, value: object) -> bytes:
        """Returns the payload for ``value``.

        Raises:
            SerializationError: Some part of it cannot be plain.
        """
        self._add(value)
        return b"".join(self._parts)

    def _add(self, value: Any) -> None:
        adder = _ADDERS.get(type(value))
        if adder is None:
            self._add_other(value)
            return
        self._depth += 1
        if self._depth > tags.DEPTH_LIMIT:
            raise RecursionError("it is nested too deeply")
        adder(self, value)
        self._depth -= 1

    def _add_constant(self, value: object) -> None:
        self._parts.append(
            bytes((tags.NONE if value is None else tags.TRUE if value else tags.FALSE,))
        )

    def _add_integer(self, value: int) -> None:
        self._add_bytes(
            value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), tags.INTEGER
        )

    def _add_float(self, value: float) -> None:
        self._parts.append(tags.FLOAT_VALUE.pack(tags.FLOAT, value))

    def _add_complex(self, value: complex) -> None:
        self._parts.append(tags.COMPLEX_VALUE.pack(tags.COMPLEX, value.real, value.imag))

    def _add_text(self, value: str, tag: int = tags.TEXT) -> None:
        self._add_bytes(value.encode("utf-8", "surrogatepass"), tag)

    def _add_bytes(self, value: bytes, tag: int = tags.BYTES) -> None:
        self._parts += (_counted(tag, len(value)), value)

    def _add_sequence(self, value: Any) -> None:
        tag = _SEQUENCES[type(value)]
        if tag in (tags.LIST, tags.SET) and self._is_again(value):
            return
        self._parts.append(_counted(tag, len(value)))
        for each in value:
            self._add(each)

    def _add_dictionary(self, value: dict[Any, Any]) -> None:
        if self._is_again(value):
            return
        is_ordered = type(value) is OrderedDict
        self._parts.append(_counted(tags.ORDERED if is_ordered else tags.DICTIONARY, len(value)))
        for key, each in value.items():
            self._add(key)
            self._add(each)
        if is_ordered:
            tags.check_attributes(OrderedDict, vars(value))
            self._add(dict(vars(value)))

    def _is_again(self, value: object) -> bool:
        """Whether a container came before; if so, writes AGAIN, otherwise records the container."""
        number = self._containers.get(id(value))
        if number is not None:
            self._parts.append(tags.NUMBER.pack(tags.AGAIN, number))
            return True
        self._containers[id(value)] = len(self._containers)
        self._kept.append(value)
        return False

    def _add_size(self, value: torch.Size) -> None:
        self._parts.append(bytes((tags.SIZE,)))
        self._add(tuple(value))

    def _add_torch(self, value: object) -> None:
        self._add_text(str(value), tags.TORCH)

    def _add_other(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, self._external_types):
            self._add_outside(value, self.externals, tags.REFERENCE)
        elif isinstance(value, (*_NAMED_TYPES, _SCRIPT_FUNCTION)):
            name = functions.name_of(value, self._main_by_name)
            if name is None:
                raise SerializationError(
                    f"{functions.describe(value)} would have to travel by value, and the receiver "
                    "is strict: define it at the top level of a module that both can import"
                )
            self._add_bytes(name, tags.NAME)
        else:
            self._add_made(value)

    def _add_outside(self, value: Any, outside: list[Any], tag: int) -> None:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(outside)
            outside.append(value)
        self._parts.append(tags.NUMBER.pack(tag, number))

    def _add_tensor(self, tensor: Tensor) -> None:
        reduced = reduce_tensor(tensor)
        if reduced is NotImplemented or (reduced is not None and not _is_rebuilt(reduced)):
            advice = "send tensor.as_subclass(torch.Tensor)"
            raise _refusal(tensor, advice if reduced is NotImplemented else _DENSE_ADVICE)
        attributes = vars(tensor)
        tags.check_attributes(Tensor, attributes)
        if attributes:
            self._parts.append(bytes((tags.ATTRIBUTED,)))
        if reduced is None:
            self._add_outside(tensor, self.tensors, tags.TENSOR)
        else:
            self._add_call(*reduced[:2])
        if attributes:
            self._add(dict(attributes))

    def _add_made(self, value: Any) -> None:
        """Adds an object of Weft's own as the call that rebuilds it."""
        kind = type(value)
        if rebuilds_plain.has(_name(kind)):
            self._add_call(kind, tuple(getattr(value, each) for each in kind.__match_args__))
            return
        if kind.__module__.startswith("torchweft.") or isinstance(value, WeftError):
            reduced = value.__reduce__()
            if isinstance(value, WeftError):
                reduced = reduced[:2]  # Notes and attributes of the program are left out.
            if _is_rebuilt(reduced):
                self._add_call(*reduced)
                return
        raise _refusal(value, "send its parts, for instance as a dict")

    def _add_call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._kept.append(arguments)
        self._add_text(_name(function), tags.MADE)
        self._add(arguments)


def _counted(tag: int, count: int) -> bytes:
    if count >= _SIZE_LIMIT:
        raise SerializationError(f"it has {count} parts, too many; send large data as tensors")
    return tags.NUMBER.pack(tag, count)


def _name(function: Any) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _is_rebuilt(reduced: object) -> bool:
    """Whether a reduced value is a call from the closed list, and nothing else."""
    return (
        isinstance(reduced, tuple) and len(reduced) == 2 and rebuilds_plain.has(_name(reduced[0]))
    )


def _refusal(value: object, advice: str) -> SerializationError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(value, Tensor) and kind in (Tensor, torch.nn.Parameter):
        name += f" of layout {value.layout} and dtype {value.dtype}"
    return SerializationError(
        f"the receiver is a strict worker, which takes {TAKES}, and no {name}; {advice}, or have "
        "it join without strict=True"
    )


_SEQUENCES: dict[type, int] = {
    tuple: tags.TUPLE,
    list: tags.LIST,
    set: tags.SET,
    frozenset: tags.FROZENSET,
}
_ADDERS: dict[type, Callable[[Encoder, Any], None]] = {
    type(None): Encoder._add_constant,
    bool: Encoder._add_constant,
    int: Encoder._add_integer,
    float: Encoder._add_float,
    complex: Encoder._add_complex,
    str: Encoder._add_text,
    bytes: Encoder._add_bytes,
    **dict.fromkeys(_SEQUENCES, Encoder._add_sequence),
    dict: Encoder._add_dictionary,
    OrderedDict: Encoder._add_dictionary,
    torch.Size: Encoder._add_size,
    **dict.fromkeys(_TORCH_TYPES, Encoder._add_torch),
}
