"""Decodes plain payloads."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import ProtocolError, WeftError
from torchweft.serialize import functions
from torchweft.serialize.plain import tags
from torchweft.serialize.reducers import set_attributes
from torchweft.serialize.registry import rebuilds_plain

_TORCH_NAMES: dict[str, Any] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}


def decode(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    externals: Sequence[object],
    resolve: Callable[[bytes], Any] = functions.resolve,
) -> Any:
    """Returns the value that an ``Encoder`` was given on another worker.

    Args:
        payload: The bytes that ``Encoder.encode`` returned; they begin with ``tags.MARK``.
        tensors: The encoder's tensors, as they arrived.
        externals: The encoder's externals, as they arrived.
        resolve: Returns the function or class with a name, or raises.

    Raises:
        ProtocolError: The bytes are malformed.
        WeftError: A name does not exist here, or may not be followed.
    """
    decoder = _Decoder(bytes(payload), tensors, externals, resolve)
    try:
        value = decoder.read()
    except WeftError:
        raise
    except Exception as error:
        raise ProtocolError(
            f"a plain message is malformed: {type(error).__name__}: {error}"
        ) from None
    if decoder.position != len(payload):
        raise ProtocolError(f"a plain message has {len(payload) - decoder.position} bytes too many")
    return value


class _Decoder:
    """Reads one payload from front to end."""

    def __init__(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        resolve: Callable[[bytes], Any],
    ) -> None:
        self._data = data
        self._tensors = tensors
        self._externals = externals
        self._resolve = resolve
        self._containers: list[Any] = []
        self._depth = 0
        self.position = 1

    def read(self) -> Any:
        """Returns the next value."""
        tag = self._data[self.position]
        self.position += 1
        self._depth += 1
        if self._depth > tags.DEPTH_LIMIT + 1:
            raise ProtocolError("a plain message is nested too deeply")
        value = _READERS[tag](self)
        self._depth -= 1
        return value

    def _number(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise ProtocolError("a plain message is cut short")
        return self._data[start : self.position]

    def _text(self) -> str:
        return self._take(self._number()).decode("utf-8", "surrogatepass")

    def _integer(self) -> int:
        return int.from_bytes(self._take(self._number()), "little", signed=True)

    def _float(self) -> float:
        return float(struct.unpack("<d", self._take(8))[0])

    def _complex(self) -> complex:
        return complex(*struct.unpack("<dd", self._take(16)))

    def _bytes(self) -> bytes:
        return self._take(self._number())

    def _values(self) -> list[Any]:
        # Each value takes at least a byte, so a false count ends with the data.
        return [self.read() for _ in range(self._number())]

    def _tuple(self) -> tuple[Any, ...]:
        return tuple(self._values())

    def _frozenset(self) -> frozenset[Any]:
        return frozenset(self._values())

    def _list(self) -> list[Any]:
        made: list[Any] = []
        self._containers.append(made)  # Before its content, which may refer back to it.
        for _ in range(self._number()):
            made.append(self.read())
        return made

    def _set(self) -> set[Any]:
        made: set[Any] = set()
        self._containers.append(made)
        made.update(self._values())
        return made

    def _dictionary(self) -> dict[Any, Any]:
        return self._fill({})

    def _ordered(self) -> dict[Any, Any]:
        made = self._fill(OrderedDict())
        vars(made).update(self._attributes(OrderedDict))
        return made

    def _fill(self, made: dict[Any, Any]) -> dict[Any, Any]:
        self._containers.append(made)
        for _ in range(self._number()):
            key = self.read()
            made[key] = self.read()
        return made

    def _again(self) -> Any:
        return self._containers[self._number()]

    def _tensor(self) -> Tensor:
        return self._tensors[self._number()]

    def _reference(self) -> object:
        return self._externals[self._number()]

    def _attributed(self) -> Tensor:
        tensor: Tensor = self.read()
        set_attributes(tensor, self._attributes(Tensor))
        return tensor

    def _attributes(self, kind: type) -> dict[str, Any]:
        attributes = self.read()
        if type(attributes) is not dict:
            raise ProtocolError("the attributes of a plain value are no dict of names")
        tags.check_attributes(kind, attributes)
        return attributes

    def _torch(self) -> Any:
        name = self._text()
        found = _TORCH_NAMES.get(name)
        return torch.device(name) if found is None else found

    def _size(self) -> torch.Size:
        sizes = self.read()
        if type(sizes) is not tuple:
            raise ProtocolError("a size in a plain message is no tuple")
        return torch.Size(sizes)

    def _named(self) -> Any:
        return self._resolve(self._bytes())

    def _made(self) -> Any:
        name = self._text()
        if not rebuilds_plain.has(name):
            raise ProtocolError(f"a plain message has an object made by {name!r}")
        arguments = self.read()
        if type(arguments) is not tuple:
            raise ProtocolError("the arguments in a plain message are no tuple")
        return functions.resolve(name.encode())(*arguments)


_READERS: tuple[Callable[[_Decoder], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: False,
    _Decoder._integer,
    _Decoder._float,
    _Decoder._complex,
    _Decoder._text,
    _Decoder._bytes,
    _Decoder._tuple,
    _Decoder._list,
    _Decoder._set,
    _Decoder._frozenset,
    _Decoder._dictionary,
    _Decoder._ordered,
    _Decoder._again,
    _Decoder._tensor,
    _Decoder._reference,
    _Decoder._attributed,
    _Decoder._torch,
    _Decoder._size,
    _Decoder._named,
    _Decoder._made,
)
