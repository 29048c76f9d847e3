"""Reads values that ``values`` has encoded, within bounds where a stranger may have made them.

Few bytes can stand for a large value. A nest of lists each of which holds the one before twice has
``2 ** depth`` leaves, and an expanded tensor (stride 0) has as many elements as its shape says. The
value itself takes little memory; a function that walks, copies or prints it takes time and memory
without end. So a strict worker bounds the *unfolded size* of each value: its size if each container
and each tensor were written out in full wherever it stands. It may be ``UNFOLDING`` times the bytes
received; a small message may unfold to ``UNFOLDED_FLOOR_BYTES``.

Keys of sets and dicts cost time with the square of their number if their hashes collide. The hashes
of numbers and tuples are public, and keys whose hashes differ can collide as well: they share their
way through the table. So the processor time is bounded, not the number of equal hashes. Honest keys
take a hundredth of the bound. A time can be wrong once (a machine that stops for a moment), so a
slow step counts only if looking the same keys up again is slow, too.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from time import thread_time
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.ids import ReferenceId
from torchweft.native import native
from torchweft.serialize import functions
from torchweft.serialize.reducers import set_attributes
from torchweft.serialize.registry import rebuilds_plain
from torchweft.serialize.values import (
    ATTRIBUTED,
    BIG_INTEGER,
    COMPLEX,
    DEPTH_LIMIT,
    HOME,
    INTEGER_VALUE,
    MADE,
    NAME,
    ORDERED,
    SIZE,
    TORCH,
    check_attributes,
    unfold_exactly,
)
from torchweft.threads.interrupts import is_of_handler

UNFOLDING = 64
"""How many times larger than the received bytes a value may be when it is unfolded."""
UNFOLDED_FLOOR_BYTES = 4 << 20
"""The unfolded size that a value of any message may have."""
CONTAINER_BYTES = 64
"""What a list, set or dict takes beside its content."""

KEYS_AT_ONCE = 16
"""Keys that go into a set or dict between two looks at the time."""
_USUAL_KEY_S = 5e-6
"""Processor time of a key up to which a step is not looked at further: honest ones take 0.1 us."""
_KEYS_FLOOR_S = 0.05
_KEY_BYTE_S = 0.1e-6
"""Processor time that all keys of a message may take beyond that, and more for each byte."""


def unfolded_limit(payload_bytes: int, tensors: Sequence[Tensor]) -> int:
    """Returns how large a value may be when it is unfolded, and checks its tensors.

    Args:
        payload_bytes: The bytes of its message without the memory of tensors.
        tensors: The tensors of the message, each once.

    Raises:
        SerializationError: The tensors have more elements than the value may have.
    """
    storages: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    limit_bytes = _limit(payload_bytes + sum(storages.values()))
    if dense_bytes(tensors) > limit_bytes:
        raise too_large(limit_bytes)
    return limit_bytes


def limit_of_repetition(payload_bytes: int, tensors: Iterable[Tensor]) -> int:
    """Returns the same for tensors of which each may have any size, once.

    They have been checked already, or are gradients, whose shapes the receiver knows.
    """
    return _limit(payload_bytes) + dense_bytes(tensors)


def _limit(received_bytes: int) -> int:
    return max(UNFOLDED_FLOOR_BYTES, UNFOLDING * received_bytes)


def dense_bytes(values: Iterable[object]) -> int:
    """Returns what the tensors among some values would take, each written out."""
    # ``nbytes`` overflows.
    return sum([each.numel() * each.itemsize for each in values if isinstance(each, Tensor)])


def too_large(limit_bytes: int) -> SerializationError:
    """Returns the error for a value whose unfolded size is beyond its limit."""
    return SerializationError(
        f"a value would take more than {limit_bytes} bytes if what it has in several places "
        "(lists, sets, dicts, tensors) and its expanded tensors (stride 0) were written out; a "
        f"strict worker takes values of {UNFOLDING} times the bytes that it received, and of "
        f"{UNFOLDED_FLOOR_BYTES >> 20} MiB: send copies (copy.deepcopy, tensor.contiguous()), or "
        "repeat and expand in the remote function"
    )


class KeyTimes:
    """Bounds the processor time that the keys of one message take.

    Args:
        size_bytes: The bytes of the message.
    """

    __slots__ = ("_left_s",)

    def __init__(self, size_bytes: int) -> None:
        self._left_s = _KEYS_FLOOR_S + size_bytes * _KEY_BYTE_S

    def add(
        self,
        keys: Sequence[object],
        add: Callable[[int, int], object],
        has: Callable[[object], object],
    ) -> None:
        """Adds keys to a set or dict, some at once.

        Args:
            keys: The keys.
            add: Adds those from one place to another.
            has: Looks a key up in the set or dict.

        Raises:
            SerializationError: The keys collide, and have taken too long.
        """
        if len(keys) <= KEYS_AT_ONCE:
            add(0, len(keys))
            return
        for start in range(0, len(keys), KEYS_AT_ONCE):
            end = min(start + KEYS_AT_ONCE, len(keys))
            began_s = thread_time()
            add(start, end)
            took_s = thread_time() - began_s
            if took_s > _USUAL_KEY_S * KEYS_AT_ONCE:
                began_s = thread_time()
                for key in keys[start:end]:
                    has(key)
                self._left_s -= min(took_s, thread_time() - began_s)
                if self._left_s < 0:
                    raise SerializationError(
                        f"the keys of a set or dict of {len(keys)} collide: their hashes are equal "
                        "or lead to the same places; send them as a list, or as texts"
                    )


# Decoding

_TORCH_NAMES: dict[str, Any] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}


def refuse_home(_: ReferenceId) -> NoReturn:
    """Refuses a reference that comes home, in a value that cannot have any."""
    raise ProtocolError("a message has a reference where there can be none")


def decode(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    externals: Sequence[object],
    resolve: Callable[[bytes], Any] = functions.resolve,
    come_home: Callable[[ReferenceId], Any] = refuse_home,
    limit_bytes: int | None = None,
) -> Any:
    """Returns the value that was encoded on another worker.

    Args:
        payload: The bytes of one value.
        tensors: The encoder's tensors, as they arrived.
        externals: The encoder's externals, as they arrived.
        resolve: Returns the function or class with a name, or raises.
        come_home: Returns the reference with an address whose value this worker owns, or raises.
        limit_bytes: How large the value may be when it is unfolded; see ``bounds``. None for any
            size.

    Raises:
        ProtocolError: The bytes are malformed.
        SerializationError: The value is larger when it is unfolded, or keys collide.
        WeftError: A name does not exist here, or may not be followed.
    """
    try:
        if native is not None and limit_bytes is None:
            made = native.decode_values(payload, tensors, externals, resolve, come_home)
            if made is not NotImplemented:
                return made
        decoder = _Decoder(bytes(payload), tensors, externals, resolve, come_home, limit_bytes)
        value = decoder.read()
    except Exception as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        raise refusal from None
    left = len(payload) - decoder.position
    if left:
        raise ProtocolError(f"a message has {left} bytes too many")
    return value


def refusal_of(error: Exception) -> ProtocolError | None:
    """Returns the error for bytes that cannot be read; None if ``error`` itself tells the cause."""
    if isinstance(error, WeftError) or is_of_handler(error):
        return None
    return ProtocolError(f"a message is malformed: {type(error).__name__}: {error}")


class _Decoder:
    """Reads one payload from front to end."""

    def __init__(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
        resolve: Callable[[bytes], Any],
        come_home: Callable[[ReferenceId], Any],
        limit_bytes: int | None,
    ) -> None:
        self._data = data
        self._tensors = tensors
        self._externals = externals
        self._resolve = resolve
        self._come_home = come_home
        self._limit_bytes = limit_bytes
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._folded_bytes = 0
        self._depth = 0
        self._times = KeyTimes(len(data))
        self.position = 0

    @property
    def unfolded_bytes(self) -> int:
        """The unfolded size of what has been read."""
        return self.position + self._folded_bytes

    def read(self) -> Any:
        """Returns the next value."""
        tag = self._data[self.position]
        self.position += 1
        self._depth += 1
        if self._depth > DEPTH_LIMIT + 1:
            raise ProtocolError("a message is nested too deeply")
        value = _READERS[tag](self)
        self._depth -= 1
        return value

    def _number(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise ProtocolError("a message is cut short")
        return self._data[start : self.position]

    def _text(self) -> str:
        return self._take(self._number()).decode("utf-8", "surrogatepass")

    def _integer(self) -> int:
        start, self.position = self.position - 1, self.position + 8
        number: int = INTEGER_VALUE.unpack_from(self._data, start)[1]
        return number

    def _float(self) -> float:
        return float(struct.unpack("<d", self._take(8))[0])

    def _bytes(self) -> bytes:
        return self._take(self._number())

    def _values(self) -> list[Any]:
        # Each value takes at least a byte, so a false count ends with the data.
        return [self.read() for _ in range(self._number())]

    def _tuple(self) -> tuple[Any, ...]:
        return tuple(self._values())

    def _frozenset(self) -> frozenset[Any]:
        return frozenset(self._with_keys(set(), self._values()))

    def _list(self) -> list[Any]:
        made: list[Any] = []
        number = self._begin(made)
        for _ in range(self._number()):
            made.append(self.read())
        self._end(number)
        return made

    def _set(self) -> set[Any]:
        made: set[Any] = set()
        number = self._begin(made)
        self._with_keys(made, self._values())
        self._end(number)
        return made

    def _with_keys(self, made: set[Any], keys: list[Any]) -> set[Any]:
        self._times.add(keys, lambda start, end: made.update(keys[start:end]), made.__contains__)
        return made

    def _dictionary(self) -> dict[Any, Any]:
        return self._fill({})

    def _fill(self, made: dict[Any, Any]) -> dict[Any, Any]:
        number = self._begin(made)
        keys, values = [], []
        for _ in range(self._number()):
            keys.append(self.read())
            values.append(self.read())
        self._times.add(
            keys,
            lambda start, end: made.update(zip(keys[start:end], values[start:end], strict=True)),
            made.__contains__,
        )
        self._end(number)
        return made

    def _begin(self, made: object) -> int:
        """Notes a container before its content, which may refer back to it; returns its number."""
        self._containers.append(made)
        self._sizes.append(-self.unfolded_bytes)
        self._folded_bytes += CONTAINER_BYTES
        return len(self._sizes) - 1

    def _end(self, number: int) -> None:
        self._sizes[number] += self.unfolded_bytes

    def _again(self) -> Any:
        number = self._number()
        if self._limit_bytes is not None:
            # The size of a container that contains itself is not known yet: no walk of it ends.
            self._fold(max(self._sizes[number], 0), self._limit_bytes)
        return self._containers[number]

    def _fold(self, size_bytes: int, limit_bytes: int) -> None:
        """Counts what is not written out in the payload."""
        self._folded_bytes += size_bytes
        if self.unfolded_bytes > limit_bytes:
            raise too_large(limit_bytes)

    def _tensor(self) -> Tensor:
        tensor = self._tensors[self._number()]
        if self._limit_bytes is not None:
            self._fold(tensor.numel() * tensor.itemsize, self._limit_bytes)
        return tensor

    def _reference(self) -> object:
        return self._externals[self._number()]


# Values that are made of one or two others, the first of which stands behind the tag.


def _with_attributes(value: Any, attributes: object) -> Any:
    if type(attributes) is not dict:
        raise ProtocolError("the attributes of a value are no dict of names")
    kind = OrderedDict if type(value) is OrderedDict else Tensor
    check_attributes(kind, attributes)
    if kind is Tensor:
        set_attributes(value, attributes)
    else:
        vars(value).update(attributes)
    return value


def _complex_of(parts: bytes, _: object) -> complex:
    return complex(*struct.unpack("<dd", parts))


def _integer_of(data: bytes, _: object) -> int:
    return int.from_bytes(data, "little", signed=True)


def _home_of(numbers: bytes, come_home: Callable[[ReferenceId], Any]) -> Any:
    return come_home(ReferenceId(*struct.unpack("<qqq", numbers)))


def _torch_of(data: bytes, _: object) -> Any:
    name = data.decode("utf-8", "surrogatepass")
    found = _TORCH_NAMES.get(name)
    return torch.device(name) if found is None else found


def _size_of(sizes: object, _: None) -> torch.Size:
    if type(sizes) is not tuple:
        raise ProtocolError("a size in a message is no tuple")
    return torch.Size(sizes)


def _made_of(data: bytes, arguments: object) -> Any:
    name = data.decode("utf-8", "surrogatepass")
    if not rebuilds_plain.has(name):
        raise ProtocolError(f"a message has an object made by {name!r}")
    if type(arguments) is not tuple:
        raise ProtocolError("the arguments in a message are no tuple")
    return functions.resolve(data)(*arguments)


_REBUILDERS: dict[int, Callable[[Any, Any], Any]] = {
    ORDERED: _with_attributes,
    ATTRIBUTED: _with_attributes,
    TORCH: _torch_of,
    SIZE: _size_of,
    MADE: _made_of,
    COMPLEX: _complex_of,
    BIG_INTEGER: _integer_of,
    NAME: lambda name, resolve: resolve(name),
    HOME: _home_of,
}
# By tag, in the order of ``values``.
_READERS: tuple[Callable[[_Decoder], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: False,
    _Decoder._integer,
    _Decoder._float,
    lambda decoder: _complex_of(decoder._take(16), None),
    _Decoder._text,
    _Decoder._bytes,
    _Decoder._tuple,
    _Decoder._list,
    _Decoder._set,
    _Decoder._frozenset,
    _Decoder._dictionary,
    lambda decoder: _with_attributes(decoder._fill(OrderedDict()), decoder.read()),
    _Decoder._again,
    _Decoder._tensor,
    _Decoder._reference,
    lambda decoder: _with_attributes(decoder.read(), decoder.read()),
    lambda decoder: _torch_of(decoder._bytes(), None),
    lambda decoder: _size_of(decoder.read(), None),
    lambda decoder: decoder._resolve(decoder._bytes()),
    lambda decoder: _made_of(decoder._bytes(), decoder.read()),
    lambda decoder: _integer_of(decoder._bytes(), None),
    lambda decoder: _home_of(decoder._take(24), decoder._come_home),
)


if native is not None:
    native.set_value_parts(unfold_exactly, lambda tag, *parts: _REBUILDERS[tag](*parts))
