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
    MADE                        a text: a name marked ``rebuilds_plain`` · its arguments, a TUPLE
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import Parameter

from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.ids import ReferenceId
from torchweft.native import native
from torchweft.serialize import bounds, functions
from torchweft.serialize.reducers import is_reduced, reduce_tensor, reduce_torch, set_attributes
from torchweft.serialize.registry import rebuilds_plain
from torchweft.threads.interrupts import is_of_handler

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


def with_names(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns positional and keyword arguments as one tuple, which ends with the names."""
    return (*args, *kwargs.values(), tuple(kwargs))


def split_names(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments in what ``with_names`` returned."""
    names = values[-1] if values else None
    if type(names) is not tuple:
        raise ProtocolError("a call has no names of its keyword arguments")
    start = len(values) - 1 - len(names)
    kwargs = dict(zip(names, values[start:-1], strict=False))
    if start < 0 or len(kwargs) < len(names):
        raise ProtocolError(f"a call has too few keyword arguments, or some twice: {names}")
    return values[:start], kwargs


TAKES = (
    "None, bool, int, float, complex, str, bytes, lists, tuples, sets and dicts of them, tensors, "
    "RRefs, torch's dtypes, devices and sizes, arrays and scalars of numpy, paths, and functions "
    "and classes that it has registered"
)

_SIZE_LIMIT = 1 << 32
_DENSE_ADVICE = "send its dense equivalent, as tensor.to_dense() or tensor.dequantize()"
_FUNCTION_TYPES = (FunctionType, BuiltinFunctionType, type)
_TORCH_TYPES = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_NAMED_TYPES = (FunctionType, BuiltinFunctionType, type, OpOverload, OpOverloadPacket)
_SCRIPT_FUNCTION: Any = torch.jit.ScriptFunction


class Beyond(Exception):
    """A value is of a kind that ``encode`` leaves to pickle."""


_REPEATED_BYTES = 32
"""A longer text that comes twice is left to pickle, which writes it once."""


class ExactEncoder:
    """Encodes one value for a worker that also reads pickles.

    It takes exact types only. Two places that hold the same tuple, set or long text go by pickle:
    written twice, a few nested tuples would fill the memory.

    Args:
        tensors: Gets the tensors in order of first appearance, each once; of any layout and dtype.
        main_by_name: Whether the receiver runs the same main program.
        home_of: Returns the address of a reference whose value the receiver owns, None for all
            other objects.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        main_by_name: bool,
        home_of: Callable[[Any], ReferenceId | None] = no_home,
    ) -> None:
        self.tensors = tensors
        self._main_by_name = main_by_name
        self._home_of = home_of
        self._parts: list[bytes] = []
        self._containers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._repeatable: set[int] = set()
        self._kept: list[object] = []  # An id is unique only while its object lives.
        self._depth = 0

    def encode(self, value: object) -> bytes:
        """Returns the payload for ``value``.

        Raises:
            Beyond: Some part of it is of another kind.
        """
        self._add(value)
        return b"".join(self._parts)

    def _add(self, value: Any) -> None:
        adder = _ADDERS.get(type(value))
        if adder is None:
            self._add_other(value)
            return
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise self._too_deep()
        adder(self, value)
        self._depth -= 1

    def _too_deep(self) -> Exception:
        return Beyond("it is nested too deeply")

    def _add_constant(self, value: object) -> None:
        self._parts.append(bytes((NONE if value is None else TRUE if value else FALSE,)))

    def _add_integer(self, value: int) -> None:
        if -_INT64_MAX <= value <= _INT64_MAX:
            self._parts.append(INTEGER_VALUE.pack(INTEGER, value))
        else:
            size = value.bit_length() // 8 + 1
            self._add_counted(BIG_INTEGER, value.to_bytes(size, "little", signed=True))

    def _add_float(self, value: float) -> None:
        self._parts.append(FLOAT_VALUE.pack(FLOAT, value))

    def _add_complex(self, value: complex) -> None:
        self._parts.append(COMPLEX_VALUE.pack(COMPLEX, value.real, value.imag))

    def _add_text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        if len(data) > _REPEATED_BYTES:
            self._check_first(value)
        self._add_counted(TEXT, data)

    def _add_bytes(self, value: bytes) -> None:
        if len(value) > _REPEATED_BYTES:
            self._check_first(value)
        self._add_counted(BYTES, value)

    def _add_counted(self, tag: int, data: bytes) -> None:
        self._parts += (_counted(tag, len(data)), data)

    def _add_sequence(self, value: Any) -> None:
        tag = _SEQUENCES[type(value)]
        if tag in (LIST, SET):
            if self._is_again(value):
                return
        elif value:
            self._check_first(value)
        self._parts.append(_counted(tag, len(value)))
        for each in value:
            self._add(each)

    def _check_first(self, value: object) -> None:
        """Raises Beyond for an object that came before and cannot be referred to."""
        if id(value) in self._repeatable:
            raise Beyond("a part of it comes twice")
        self._repeatable.add(id(value))
        self._kept.append(value)

    def _add_dictionary(self, value: dict[Any, Any]) -> None:
        if self._is_again(value):
            return
        tag = DICTIONARY
        if isinstance(value, OrderedDict):
            tag = ORDERED
            self._check_attributes(value)
        self._parts.append(_counted(tag, len(value)))
        for key, each in value.items():
            self._add(key)
            self._add(each)
        if tag == ORDERED:
            self._add(dict(vars(value)))

    def _check_attributes(self, value: OrderedDict[Any, Any]) -> None:
        try:
            check_attributes(OrderedDict, vars(value))
        except ProtocolError as error:
            raise Beyond(str(error)) from None

    def _is_again(self, value: object) -> bool:
        """Whether a container came before; if so, writes AGAIN, otherwise records the container."""
        number = self._containers.get(id(value))
        if number is not None:
            self._parts.append(NUMBER.pack(AGAIN, number))
            return True
        self._containers[id(value)] = len(self._containers)
        self._kept.append(value)
        return False

    def _add_size(self, value: torch.Size) -> None:
        self._parts.append(bytes((SIZE,)))
        self._add(tuple(value))

    def _add_torch(self, value: object) -> None:
        self._add_counted(TORCH, str(value).encode())

    def _add_other(self, value: Any) -> None:
        if type(value) is Tensor or type(value) is Parameter:
            if value.__dict__:
                raise Beyond("a tensor has attributes")
            self._add_outside(value, self.tensors, TENSOR)
            return
        if isinstance(value, _FUNCTION_TYPES):
            name = functions.name_of(value, self._main_by_name)
            if name is None:
                raise Beyond("a function has no name")
            self._add_counted(NAME, name)
            return
        home = self._home_of(value)
        if home is None:
            raise Beyond(f"{type(value)} is left to pickle")
        self._parts.append(HOME_VALUE.pack(HOME, *home))

    def _add_outside(self, value: Any, outside: list[Any], tag: int) -> None:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(outside)
            outside.append(value)
            self._kept.append(value)
        self._parts.append(NUMBER.pack(tag, number))


class Encoder(ExactEncoder):
    """Encodes one value for a strict worker, and keeps the objects that stay outside the payload.

    Args:
        main_by_name: Whether the receiver runs the same main program.
        external_types: Classes whose objects stay outside, like tensors.

    Attributes:
        tensors: The tensors in order of first appearance, each once.
        externals: The other objects that stay outside, in the same way.
    """

    def __init__(self, main_by_name: bool, external_types: tuple[type, ...]) -> None:
        super().__init__([], main_by_name)
        self._external_types = external_types
        self.externals: list[object] = []

    def encode(self, value: object) -> bytes:
        """Returns the payload for ``value``.

        Raises:
            SerializationError: Some part of it is of another kind.
        """
        return super().encode(value)

    def _too_deep(self) -> Exception:
        return RecursionError("it is nested too deeply")

    def _check_first(self, value: object) -> None:
        """Takes every object again and again: there is no other way for it to travel."""

    def _check_attributes(self, value: OrderedDict[Any, Any]) -> None:
        check_attributes(OrderedDict, vars(value))

    def _add_other(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, self._external_types):
            self._add_outside(value, self.externals, REFERENCE)
        elif isinstance(value, (*_NAMED_TYPES, _SCRIPT_FUNCTION)):
            name = functions.name_of(value, self._main_by_name)
            if name is None:
                raise SerializationError(
                    f"{functions.describe(value)} would have to travel by value, and the receiver "
                    "is strict: define it at the top level of a module that both can import"
                )
            self._add_counted(NAME, name)
        else:
            self._add_made(value)

    def _add_tensor(self, tensor: Tensor) -> None:
        reduced = reduce_tensor(tensor)
        if reduced is NotImplemented or (reduced is not None and not _is_rebuilt(reduced)):
            advice = "send tensor.as_subclass(torch.Tensor)"
            raise _refusal(tensor, advice if reduced is NotImplemented else _DENSE_ADVICE)
        attributes = vars(tensor)
        check_attributes(Tensor, attributes)
        if attributes:
            self._parts.append(bytes((ATTRIBUTED,)))
        if reduced is None:
            self._add_outside(tensor, self.tensors, TENSOR)
        else:
            self._add_call(*reduced[:2])
        if attributes:
            self._add(dict(attributes))

    def _add_made(self, value: Any) -> None:
        """Adds an object of Weft's own, of numpy, or a path as the call that rebuilds it."""
        kind = type(value)
        reduced = reduce_torch(value) if is_reduced(kind) else None
        if _is_rebuilt(reduced):
            assert reduced is not None
            self._add_call(*reduced)
            return
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
        self._add_counted(MADE, _name(function).encode("utf-8", "surrogatepass"))
        self._add(arguments)


def _counted(tag: int, count: int) -> bytes:
    if count >= _SIZE_LIMIT:
        raise SerializationError(f"it has {count} parts, too many; send large data as tensors")
    return NUMBER.pack(tag, count)


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
    elif kind.__module__ == "numpy" and hasattr(value, "dtype"):
        name += f" of dtype {value.dtype}"
    return SerializationError(
        f"the receiver is a strict worker, which takes {TAKES}, and no {name}; {advice}, or have "
        "it join without strict=True"
    )


_SEQUENCES: dict[type, int] = {
    tuple: TUPLE,
    list: LIST,
    set: SET,
    frozenset: FROZENSET,
}
_ADDERS: dict[type, Callable[[ExactEncoder, Any], None]] = {
    type(None): ExactEncoder._add_constant,
    bool: ExactEncoder._add_constant,
    int: ExactEncoder._add_integer,
    float: ExactEncoder._add_float,
    complex: ExactEncoder._add_complex,
    str: ExactEncoder._add_text,
    bytes: ExactEncoder._add_bytes,
    **dict.fromkeys(_SEQUENCES, ExactEncoder._add_sequence),
    dict: ExactEncoder._add_dictionary,
    OrderedDict: ExactEncoder._add_dictionary,
    torch.Size: ExactEncoder._add_size,
    **dict.fromkeys(_TORCH_TYPES, ExactEncoder._add_torch),
}


def encode(
    value: object,
    tensors: list[Tensor],
    main_by_name: bool,
    home_of: Callable[[Any], ReferenceId | None] = no_home,
) -> bytes | None:
    """Returns the payload of a value; None if it has to go by pickle, or as to a strict worker.

    Args:
        value: The value.
        tensors: An empty list, which gets the tensors as ``ExactEncoder`` says; useless after None.
        main_by_name: Whether the receiver runs the same main program.
        home_of: As for ``ExactEncoder``.
    """
    if native is not None:
        return native.encode_values(value, tensors, _NAME_OF[main_by_name], home_of)
    try:
        return ExactEncoder(tensors, main_by_name, home_of).encode(value)
    except Beyond:
        return None


_NAME_OF = (
    partial(functions.name_of, main_by_name=False),
    partial(functions.name_of, main_by_name=True),
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
            return native.decode_values(payload, tensors, externals, resolve, come_home)
        decoder = _Decoder(bytes(payload), tensors, externals, resolve, come_home, limit_bytes)
        value = decoder.read()
    except WeftError:
        raise
    except Exception as error:
        if is_of_handler(error):
            raise
        raise ProtocolError(f"a message is malformed: {type(error).__name__}: {error}") from None
    left = len(payload) - decoder.position
    if left:
        raise ProtocolError(f"a message has {left} bytes too many")
    return value


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
        self._key_times: bounds.KeyTimes | None = None
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

    def _big_integer(self) -> int:
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
        if len(keys) <= bounds.KEYS_AT_ONCE:
            made.update(keys)
        else:
            self._times.add(
                keys, lambda start, end: made.update(keys[start:end]), made.__contains__
            )
        return made

    def _dictionary(self) -> dict[Any, Any]:
        return self._fill({})

    def _ordered(self) -> dict[Any, Any]:
        made: dict[Any, Any] = self._fill(OrderedDict())
        return _with_attributes(made, self.read())  # type: ignore[no-any-return]

    def _fill(self, made: dict[Any, Any]) -> dict[Any, Any]:
        number = self._begin(made)
        count = self._number()
        if count <= bounds.KEYS_AT_ONCE:
            for _ in range(count):
                key = self.read()
                made[key] = self.read()
        else:
            keys, values = [], []
            for _ in range(count):
                keys.append(self.read())
                values.append(self.read())
            self._times.add(
                keys,
                lambda start, end: made.update(
                    zip(keys[start:end], values[start:end], strict=True)
                ),
                made.__contains__,
            )
        self._end(number)
        return made

    @property
    def _times(self) -> bounds.KeyTimes:
        if self._key_times is None:
            self._key_times = bounds.KeyTimes(len(self._data))
        return self._key_times

    def _begin(self, made: object) -> int:
        """Notes a container before its content, which may refer back to it; returns its number."""
        self._containers.append(made)
        self._sizes.append(-self.unfolded_bytes)
        self._folded_bytes += bounds.CONTAINER_BYTES
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
            raise bounds.too_large(limit_bytes)

    def _tensor(self) -> Tensor:
        tensor = self._tensors[self._number()]
        if self._limit_bytes is not None:
            self._fold(tensor.numel() * tensor.itemsize, self._limit_bytes)
        return tensor

    def _reference(self) -> object:
        return self._externals[self._number()]

    def _home(self) -> Any:
        start, self.position = self.position - 1, self.position + HOME_VALUE.size - 1
        return self._come_home(ReferenceId(*HOME_VALUE.unpack_from(self._data, start)[1:]))

    def _named(self) -> Any:
        return self._resolve(self._bytes())

    def _rebuilt(self, tag: int) -> Any:
        first = self._text() if tag in (TORCH, MADE) else self.read()
        second = self.read() if tag in (ATTRIBUTED, MADE) else None
        return _REBUILDERS[tag](first, second)


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


def _torch_of(name: str, _: None) -> Any:
    found = _TORCH_NAMES.get(name)
    return torch.device(name) if found is None else found


def _size_of(sizes: object, _: None) -> torch.Size:
    if type(sizes) is not tuple:
        raise ProtocolError("a size in a message is no tuple")
    return torch.Size(sizes)


def _made_of(name: str, arguments: object) -> Any:
    if not rebuilds_plain.has(name):
        raise ProtocolError(f"a message has an object made by {name!r}")
    if type(arguments) is not tuple:
        raise ProtocolError("the arguments in a message are no tuple")
    return functions.resolve(name.encode())(*arguments)


_REBUILDERS: dict[int, Callable[[Any, Any], Any]] = {
    ORDERED: _with_attributes,
    ATTRIBUTED: _with_attributes,
    TORCH: _torch_of,
    SIZE: _size_of,
    MADE: _made_of,
}
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
    lambda decoder: decoder._rebuilt(ATTRIBUTED),
    lambda decoder: decoder._rebuilt(TORCH),
    lambda decoder: decoder._rebuilt(SIZE),
    _Decoder._named,
    lambda decoder: decoder._rebuilt(MADE),
    _Decoder._big_integer,
    _Decoder._home,
)


if native is not None:
    native.set_value_parts(lambda tag, *parts: _REBUILDERS[tag](*parts), ReferenceId)
