"""Values that no worker of Weft would make, but that a hostile member can send."""

from __future__ import annotations

import itertools
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

    def _unfold(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, Made):
            name = value.name.encode("utf-8", "surrogatepass")
            return tags.NUMBER.pack(tags.MADE, len(name)) + name, value.arguments
        if isinstance(value, Named):
            return (tags.NUMBER.pack(tags.NAME, len(value.name)) + value.name,)
        if isinstance(value, Attributed):
            return bytes((tags.ATTRIBUTED,)), value.value, value.attributes
        if isinstance(value, Ordered):
            entries = itertools.chain.from_iterable(value.content.items())
            head = tags.NUMBER.pack(tags.ORDERED, len(value.content))
            return head, *entries, value.attributes
        if isinstance(value, Home):
            return (tags.HOME_VALUE.pack(tags.HOME, *value.address),)
        if isinstance(value, Keys):
            if value.tag != tags.FROZENSET:
                self._containers[id(value)] = len(self._containers)
                self._kept.append(value)
            each = (None,) if value.tag == tags.DICTIONARY else ()
            parts = (part for key in value.keys for part in (key, *each))
            return tags.NUMBER.pack(value.tag, len(value.keys)), *parts
        if isinstance(value, Numbered):
            return (tags.NUMBER.pack(*value),)
        if isinstance(value, Tensor):
            return self._outside(value, self.tensors, tags.TENSOR)
        return super()._unfold(value)


def pack_freely(value: Any) -> Packed:
    """Packs as ``pack_plain`` does, but also the values above."""
    encoder = FreeEncoder()
    payload = encoder.encode(value)
    return Packed(payload, encoder.tensors, encoder.externals)
