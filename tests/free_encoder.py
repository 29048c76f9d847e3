"""Values that no worker of Weft would make, but that a hostile member can send."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchweft.engine.codec import values as tags
from torchweft.engine.codec.objects import Packed
from torchweft.engine.codec.values import Encoder
from torchweft.rpc import RRef


class Made(NamedTuple):
    """A call that the reader is asked to make, as of a name marked ``rebuilds_plain``."""

    name: str
    arguments: Any


class Named(NamedTuple):
    """A function or class by a name."""

    name: bytes


class Attributed(NamedTuple):
    """A value, which should be a tensor, with attributes."""

    value: Any
    attributes: Any


class Ordered(NamedTuple):
    """An ``OrderedDict`` with attributes."""

    content: dict[Any, Any]
    attributes: Any


class Home(NamedTuple):
    """A reference that comes home, by any address."""

    address: tuple[int, int, int]


class Numbered(NamedTuple):
    """A tag of a tensor, a reference or a container, followed by any number."""

    tag: int
    number: int


class Keys(NamedTuple):
    """A set, frozenset or dict (by its tag) of any keys, which is not put together here."""

    tag: int
    keys: list[Any]


class FreeEncoder(Encoder):
    """Encodes what an honest encoder does, and the values above, without checks."""

    def __init__(self) -> None:
        super().__init__(True, (RRef,))

    def _add_other(self, value: Any) -> None:
        if isinstance(value, Made):
            self._add_counted(tags.MADE, value.name.encode("utf-8", "surrogatepass"))
            self._add(value.arguments)
        elif isinstance(value, Named):
            self._add_counted(tags.NAME, value.name)
        elif isinstance(value, Attributed):
            self._parts.append(bytes((tags.ATTRIBUTED,)))
            self._add(value.value)
            self._add(value.attributes)
        elif isinstance(value, Ordered):
            self._parts.append(tags.NUMBER.pack(tags.ORDERED, len(value.content)))
            for each in (*value.content.items(), (value.attributes,)):
                for part in each:
                    self._add(part)
        elif isinstance(value, Home):
            self._parts.append(tags.HOME_VALUE.pack(tags.HOME, *value.address))
        elif isinstance(value, Keys):
            if value.tag != tags.FROZENSET:
                self._containers[id(value)] = len(self._containers)
                self._kept.append(value)
            self._parts.append(tags.NUMBER.pack(value.tag, len(value.keys)))
            for key in value.keys:
                self._add(key)
                if value.tag == tags.DICTIONARY:
                    self._add(None)
        elif isinstance(value, Numbered):
            self._parts.append(tags.NUMBER.pack(*value))
        elif isinstance(value, Tensor):
            self._add_outside(value, self.tensors, tags.TENSOR)
        else:
            super()._add_other(value)


def pack_freely(value: Any) -> Packed:
    """Packs as ``pack_plain`` does, but also the values above."""
    encoder = FreeEncoder()
    payload = encoder.encode(value)
    return Packed(payload, encoder.tensors, encoder.externals)
