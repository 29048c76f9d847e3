"""The format of values: bytes of a closed list of kinds, which decoding makes and nothing else.

The payload of a message is such a value, or a pickle. Its first byte says which: every pickle
begins with 0x80. ``encode`` writes exact types of Python and their containers; everything else goes
by pickle. A strict worker reads no pickles: for it the ``Encoder`` writes every value in this
format. ``encode`` and ``decode`` have a twin in C, which makes the same bytes. No class defines how
it is read, and a NAME is looked up by the rules of the worker, as for a call. Tensors and
references stay outside, as they do for a pickle, and a number replaces each. Tensors are dense; a
sparse tensor of coordinates is MADE of dense tensors, and checked. An attribute never hides a
member of its class: the code that uses the value would call it.

Layout, little-endian: a tag (u8) and what follows it::

    NONE, TRUE, FALSE           -
    INTEGER                     i64
    BIG_INTEGER                 size u32 · two's complement
    FLOAT, COMPLEX              f64, two f64
    TEXT, BYTES                 size u32 · the bytes (text in UTF-8)
    TUPLE, LIST, SET, FROZENSET number of values u32 · the values
    DICTIONARY, ORDERED         number of entries u32 · key and value of each; an ORDERED one has
                                its attributes, a DICTIONARY, behind it
    AGAIN                       number u32 of a list, set or dict that came before
    TENSOR, REFERENCE           number u32
    HOME                        three i64: a reference whose value the receiver owns
    ATTRIBUTED                  a tensor · its attributes, a DICTIONARY
    TORCH                       a text: the name of a dtype, layout, memory format or device
    SIZE                        a TUPLE of integers
    NAME                        a text: module and name of a function or class
    MADE                        a text: a name marked ``rebuilds_plain``, or, for a reader that
                                takes pickles, one of ``makers`` · its arguments, a TUPLE

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

import functools
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import thread_time
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import Parameter

from torchweft.engine.codec import functions, makers
from torchweft.engine.codec.reducers import reduce_tensor, reduce_torch, set_attributes
from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.ids import ReferenceId
from torchweft.native import native

PICKLE = 0x80
"""First byte of a payload that is a pickle."""

(NONE, TRUE, FALSE, INTEGER, FLOAT, COMPLEX, TEXT, BYTES, TUPLE, LIST, SET, FROZENSET) = range(12)
(DICTIONARY, ORDERED, AGAIN, TENSOR, REFERENCE, ATTRIBUTED) = range(12, 18)
(TORCH, SIZE, NAME, MADE, BIG_INTEGER, HOME) = range(18, 24)

DEPTH_LIMIT = 150
"""How deeply values may be nested."""

NUMBER = struct.Struct("<BI")
INTEGER_VALUE = struct.Struct("<Bq")
HOME_VALUE = struct.Struct("<Bqqq")
FLOAT_VALUE = struct.Struct("<Bd")
COMPLEX_VALUE = struct.Struct("<Bdd")


def check_attributes(kind: type, attributes: Mapping[str, object]) -> None:
    """Raises ProtocolError if attributes of an object would hide members of its class."""
    for name in attributes:
        if type(name) is not str or hasattr(kind, name) or name.startswith("__"):
            raise ProtocolError(
                f"attribute {name!r} of a {kind.__name__} cannot travel without pickle: it would "
                "hide something of the class; give it another name"
            )


_INT64_MAX = (1 << 63) - 1


def no_home(_: object) -> None:
    """Says of every object that it is no reference that goes home."""


TAKES = (
    "None, bool, int, float, complex, str, bytes, lists, tuples, sets and dicts of them, tensors, "
    "RRefs, torch's dtypes, devices and sizes, arrays and scalars of numpy, paths, and functions "
    "and classes that it has registered"
)

_SIZE_LIMIT = 1 << 32
_DENSE_ADVICE = "send its dense equivalent, as tensor.to_dense() or tensor.dequantize()"
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_SCRIPT_FUNCTION: Any = torch.jit.ScriptFunction
_NAMED_TYPES = (
    *(FunctionType, BuiltinFunctionType, type, OpOverload, OpOverloadPacket),
    _SCRIPT_FUNCTION,
)
_CONTAINERS = frozenset({list, dict, set, OrderedDict})
"""Types of objects that AGAIN can refer to."""
_ONCE = frozenset({tuple, frozenset, str, bytes})
"""Types of objects of which a larger one that comes twice is left to pickle."""


class Beyond(Exception):
    """A value is of a kind that ``encode`` leaves to pickle."""


_REPEATED_BYTES = 32
"""A longer text that comes twice is left to pickle, which writes it once."""
_MOST_MADE = 8
"""MADE objects of a value that need no pickle."""


class ExactEncoder:
    """Encodes one value for a worker that also reads pickles.

    It takes exact types only. Two places that hold the same tuple, set, long text or MADE object go
    by pickle: written twice, a few nested tuples would fill the memory. So do more MADE objects
    than ``_MOST_MADE``, since a pickle names their class once.

    Args:
        tensors: Gets the tensors in order of first appearance, each once; of any layout and dtype.
        receiver: 1 if it runs the same main program, plus ``NO_MAKERS`` if it is strict.
        home_of: Returns the address of a reference whose value the receiver owns, None for all
            other objects.
    """

    _beyond: type[Exception] = Beyond

    def __init__(
        self,
        tensors: list[Tensor],
        receiver: int,
        home_of: Callable[[Any], ReferenceId | None] = no_home,
    ) -> None:
        self.tensors = tensors
        self._receiver = receiver
        self._home_of = home_of
        self._parts: list[bytes] = []
        self._containers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._repeatable: set[int] = set()
        self._kept: list[object] = []  # An id is unique only while its object lives.
        self._depth = self._made_count = 0

    def encode(self, value: object) -> bytes:
        """Returns the payload for ``value``.

        Raises:
            Beyond: Some part of it is of another kind; SerializationError for a strict worker.
        """
        self._add(value)
        return b"".join(self._parts)

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in _CONTAINERS and self._is_again(value):
            return
        first, *others = self._unfold(value)
        if first[0] == MADE:
            self._check_made(value)
        elif kind in _ONCE and (others or len(first) > NUMBER.size + _REPEATED_BYTES):
            self._check_first(value)
        depth, self._depth = self._depth, self._depth + (2 if first[0] == MADE else 1)
        if self._depth > DEPTH_LIMIT:
            raise self._beyond("it is nested too deeply")
        self._parts.append(first)
        for each in others:
            self._add(each)
        self._depth = depth

    def _is_again(self, value: object) -> bool:
        """Whether a container came before; if so, writes AGAIN, otherwise records the container."""
        number = self._containers.get(id(value))
        if number is not None:
            self._parts.append(NUMBER.pack(AGAIN, number))
            return True
        self._containers[id(value)] = len(self._containers)
        self._kept.append(value)
        return False

    def _check_first(self, value: object) -> None:
        """Raises Beyond for an object that came before and cannot be referred to."""
        if id(value) in self._repeatable:
            raise Beyond("a part of it comes twice")
        self._repeatable.add(id(value))
        self._kept.append(value)

    def _check_made(self, value: object) -> None:
        self._check_first(value)
        self._made_count += 1
        if self._made_count > _MOST_MADE:
            raise Beyond("it has many objects")

    def _unfold(self, value: Any) -> tuple[Any, ...]:
        """Returns the parts of a value: its first bytes, and the values that follow."""
        if type(value) is Tensor or type(value) is Parameter:
            parts = None if value.__dict__ else self._outside(value, self.tensors, TENSOR)
        else:
            parts = unfold_exactly(value, self._receiver, self._home_of)
        if parts is None:
            raise Beyond(f"{type(value)} is left to pickle")
        return parts

    def _outside(self, value: Any, outside: list[Any], tag: int) -> tuple[Any, ...]:
        """Puts an object outside of the payload, once, and returns its parts."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(outside)
            outside.append(value)
            self._kept.append(value)
        return (NUMBER.pack(tag, number),)


class Encoder(ExactEncoder):
    """Encodes one value for a strict worker, and keeps the objects that stay outside the payload.

    Args:
        main_by_name: Whether the receiver runs the same main program.
        external_types: Classes whose objects stay outside, like tensors.

    Attributes:
        tensors: The tensors in order of first appearance, each once.
        externals: The other objects that stay outside, in the same way.
    """

    _beyond = RecursionError

    def __init__(self, main_by_name: bool, external_types: tuple[type, ...]) -> None:
        super().__init__([], main_by_name)
        self._main_by_name = main_by_name
        self._external_types = external_types
        self.externals: list[object] = []

    def _check_first(self, value: object) -> None:
        """Takes every object again and again: there is no other way for it to travel."""

    _check_made = _check_first

    def _unfold(self, value: Any) -> tuple[Any, ...]:
        unfolder = _UNFOLDERS.get(type(value))
        if unfolder is not None:
            return unfolder(value)
        if isinstance(value, Tensor):
            return self._unfold_tensor(value)
        if isinstance(value, self._external_types):
            return self._outside(value, self.externals, REFERENCE)
        if not isinstance(value, _NAMED_TYPES):
            return _unfold_made(value)
        name = functions.name_of(value, self._main_by_name)
        if name is None:
            raise SerializationError(
                f"{functions.describe(value)} would have to travel by value, and the receiver "
                "is strict: define it at the top level of a module that both can import"
            )
        return _unfold_bytes(name, NAME)

    def _unfold_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        reduced = reduce_tensor(tensor)
        if reduced is NotImplemented or (reduced is not None and not makers.is_rebuilt(reduced)):
            advice = "send tensor.as_subclass(torch.Tensor)"
            raise _refusal(tensor, advice if reduced is NotImplemented else _DENSE_ADVICE)
        attributes = vars(tensor)
        check_attributes(Tensor, attributes)
        if reduced is None:
            parts = self._outside(tensor, self.tensors, TENSOR)
        else:
            parts = _unfold_call(*reduced[:2])
        if not attributes:
            return parts
        first, *others = parts
        return bytes((ATTRIBUTED,)) + first, *others, dict(attributes)


def _counted(tag: int, count: int) -> bytes:
    if count >= _SIZE_LIMIT:
        raise SerializationError(f"it has {count} parts, too many; send large data as tensors")
    return NUMBER.pack(tag, count)


def _refusal(value: object, advice: str) -> SerializationError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if isinstance(value, Tensor) and kind in (Tensor, torch.nn.Parameter):
        name += f" of layout {value.layout} and dtype {value.dtype}"
    elif kind.__module__ == "numpy" and hasattr(value, "dtype"):
        name += f" of dtype {value.dtype}"
    return SerializationError(
        f"the receiver is a strict worker, which takes {TAKES}, and no {name}; {advice}, or have "
        "it join without strict=True"
    )


# A value is written as its parts: bytes, and values that follow.


def _unfold_made(value: Any) -> tuple[Any, ...]:
    """Unfolds an object of Weft's own, of numpy, or a path as the call that rebuilds it."""
    kind = type(value)
    reduced: Any = reduce_torch(value)
    if makers.is_rebuilt(reduced):
        return _unfold_call(*reduced)
    if rebuilds_plain.has(makers.name_in(kind)):
        return _unfold_call(kind, tuple(getattr(value, each) for each in kind.__match_args__))
    if kind.__module__.startswith("torchweft.") or isinstance(value, WeftError):
        reduced = value.__reduce__()
        if isinstance(value, WeftError):
            reduced = reduced[:2]  # Notes and attributes of the program are left out.
        if makers.is_rebuilt(reduced):
            return _unfold_call(*reduced)
    raise _refusal(value, "send its parts, for instance as a dict")


def _unfold_call(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return _unfold_bytes(makers.name_in(function).encode("utf-8", "surrogatepass"), MADE)[
        0
    ], arguments


def _unfold_bytes(value: bytes, tag: int = BYTES) -> tuple[Any, ...]:
    return (_counted(tag, len(value)) + value,)


def _unfold_integer(value: int) -> tuple[Any, ...]:
    if -_INT64_MAX <= value <= _INT64_MAX:
        return (INTEGER_VALUE.pack(INTEGER, value),)
    size = value.bit_length() // 8 + 1
    return _unfold_bytes(value.to_bytes(size, "little", signed=True), BIG_INTEGER)


def _unfold_complex(value: complex) -> tuple[Any, ...]:
    return (COMPLEX_VALUE.pack(COMPLEX, value.real, value.imag),)


def _unfold_dictionary(value: dict[Any, Any], tag: int = DICTIONARY) -> tuple[Any, ...]:
    return (_counted(tag, len(value)), *itertools.chain.from_iterable(value.items()))


def _unfold_ordered(value: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    attributes = vars(value)
    check_attributes(OrderedDict, attributes)
    return (*_unfold_dictionary(value, ORDERED), dict(attributes))


_UNFOLDERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    type(None): lambda value: (bytes((NONE,)),),
    bool: lambda value: (bytes((TRUE if value else FALSE,)),),
    int: _unfold_integer,
    float: lambda value: (FLOAT_VALUE.pack(FLOAT, value),),
    complex: _unfold_complex,
    str: lambda value: _unfold_bytes(value.encode("utf-8", "surrogatepass"), TEXT),
    bytes: _unfold_bytes,
    tuple: lambda value: (_counted(TUPLE, len(value)), *value),
    list: lambda value: (_counted(LIST, len(value)), *value),
    set: lambda value: (_counted(SET, len(value)), *value),
    frozenset: lambda value: (_counted(FROZENSET, len(value)), *value),
    dict: _unfold_dictionary,
    OrderedDict: _unfold_ordered,
    torch.Size: lambda value: (bytes((SIZE,)), tuple(value)),
    **dict.fromkeys(_TORCH_TYPES, lambda value: _unfold_bytes(str(value).encode(), TORCH)),
}


def unfold_exactly(
    value: Any, receiver: int, home_of: Callable[[Any], ReferenceId | None]
) -> tuple[Any, ...] | None:
    """Returns the parts of a value for ``encode``; None if it has to go by pickle."""
    unfolder = _UNFOLDERS.get(type(value))
    if unfolder is not None:
        try:
            return unfolder(value)
        except ProtocolError:
            return None
    if isinstance(value, _NAMED_TYPES):
        name = functions.name_of(value, bool(receiver & 1))
        return None if name is None else _unfold_bytes(name, NAME)
    home = home_of(value)
    if home is not None:
        return (HOME_VALUE.pack(HOME, *home),)
    parts = None if receiver & makers.NO_MAKERS else makers.made_parts(value)
    return None if parts is None else _unfold_flat(*parts, bool(receiver & 1))


def _unfold_flat(
    function: Callable[..., Any], arguments: tuple[Any, ...], main_by_name: bool
) -> tuple[Any, ...] | None:
    """Unfolds a call to the same bytes as ``_unfold_call``, with less to unfold after it."""
    head = _made_head(function, len(arguments))
    if not arguments or not isinstance(arguments[0], type):
        return (head, *arguments)
    name = functions.name_of(arguments[0], main_by_name)
    if name is None:
        return None
    return (head + _counted(NAME, len(name)) + name, *arguments[1:])


@functools.lru_cache(256)
def _made_head(function: Callable[..., Any], count: int) -> bytes:
    name = makers.name_in(function).encode()
    return _counted(MADE, len(name)) + name + _counted(TUPLE, count)


def encode(
    value: object,
    tensors: list[Tensor],
    receiver: int,
    home_of: Callable[[Any], ReferenceId | None] = no_home,
) -> bytes | None:
    """Returns the payload of a value; None if it has to go by pickle, or as to a strict worker.

    Args:
        value: The value.
        tensors: An empty list, which gets the tensors as ``ExactEncoder`` says; useless after None.
        receiver: As for ``ExactEncoder``.
        home_of: As for ``ExactEncoder``.
    """
    if native is not None:
        return native.encode_values(value, tensors, receiver, home_of) or None
    try:
        return ExactEncoder(tensors, receiver, home_of).encode(value)
    except Beyond:
        return None


# Decoding, and its bounds where a stranger may have made the bytes

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
    make: Callable[[bytes, object], Any] = makers.made_of,
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
        make: ``makers.made_plainly`` for a strict worker.

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
        data = bytes(payload)
        decoder = _Decoder(data, tensors, externals, resolve, come_home, limit_bytes, make)
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
        make: Callable[[bytes, object], Any],
    ) -> None:
        self._data = data
        self._make = make
        self._tensors = tensors
        self._externals = externals
        self._resolve = resolve
        self._come_home = come_home
        self._limit_bytes = limit_bytes
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._folded_bytes = 0
        self._depth = 0
        self._keys_left_s = _KEYS_FLOOR_S + len(data) * _KEY_BYTE_S
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

    def _with_keys(self, made: Any, keys: list[Any], entries: Sequence[Any] = ()) -> Any:
        """Adds keys to a set, or entries to a dict, some at once.

        Raises:
            SerializationError: The keys collide, and have taken too long.
        """
        for start in range(0, len(keys), KEYS_AT_ONCE):
            some = slice(start, start + KEYS_AT_ONCE)
            began_s = thread_time()
            made.update((entries or keys)[some])
            took_s = thread_time() - began_s
            if took_s > _USUAL_KEY_S * KEYS_AT_ONCE:
                began_s = thread_time()
                for key in keys[some]:
                    made.__contains__(key)
                self._keys_left_s -= min(took_s, thread_time() - began_s)
                if self._keys_left_s < 0:
                    raise SerializationError(
                        f"the keys of a set or dict of {len(keys)} collide: their hashes are equal "
                        "or lead to the same places; send them as a list, or as texts"
                    )
        return made

    def _dictionary(self) -> dict[Any, Any]:
        return self._fill({})

    def _fill(self, made: dict[Any, Any]) -> dict[Any, Any]:
        number = self._begin(made)
        entries = [(self.read(), self.read()) for _ in range(self._number())]
        self._with_keys(made, [key for key, _ in entries], entries)
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

    def _made(self) -> Any:
        return self._make(self._bytes(), self.read())


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


_REBUILDERS: dict[int, Callable[[Any, Any], Any]] = {
    ORDERED: _with_attributes,
    ATTRIBUTED: _with_attributes,
    TORCH: _torch_of,
    SIZE: _size_of,
    MADE: makers.made_of,
    COMPLEX: _complex_of,
    BIG_INTEGER: _integer_of,
    NAME: lambda name, resolve: resolve(name),
    HOME: _home_of,
}
# By tag, in the order of the tags.
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
    _Decoder._made,
    lambda decoder: _integer_of(decoder._bytes(), None),
    lambda decoder: _home_of(decoder._take(24), decoder._come_home),
)


if native is not None:
    native.set_value_parts(unfold_exactly, [_REBUILDERS.get(tag) for tag in range(HOME + 1)])
