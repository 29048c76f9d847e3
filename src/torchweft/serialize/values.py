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

import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import Parameter

from torchweft.errors import ProtocolError, SerializationError, WeftError
from torchweft.ids import ReferenceId
from torchweft.native import native
from torchweft.serialize import functions
from torchweft.serialize.reducers import is_reduced, reduce_tensor, reduce_torch
from torchweft.serialize.registry import rebuilds_plain

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
            self._add_unfolded(value)

    def _add_float(self, value: float) -> None:
        self._parts.append(FLOAT_VALUE.pack(FLOAT, value))

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

    def _add_tuple(self, value: tuple[Any, ...]) -> None:
        if value:
            self._check_first(value)
        self._add_all(TUPLE, value)

    def _add_list(self, value: list[Any]) -> None:
        if not self._is_again(value):
            self._add_all(LIST, value)

    def _add_all(self, tag: int, values: Sequence[Any]) -> None:
        self._parts.append(_counted(tag, len(values)))
        for each in values:
            self._add(each)

    def _check_first(self, value: object) -> None:
        """Raises Beyond for an object that came before and cannot be referred to."""
        if id(value) in self._repeatable:
            raise Beyond("a part of it comes twice")
        self._repeatable.add(id(value))
        self._kept.append(value)

    def _add_dictionary(self, value: dict[Any, Any]) -> None:
        if not self._is_again(value):
            self._parts.append(_counted(DICTIONARY, len(value)))
            for key, each in value.items():
                self._add(key)
                self._add(each)

    def _add_container(self, value: Any) -> None:
        if not self._is_again(value):
            self._add_unfolded(value)

    def _add_frozenset(self, value: frozenset[Any]) -> None:
        if value:
            self._check_first(value)
        self._add_unfolded(value)

    def _add_unfolded(self, value: Any) -> None:
        first, *others = self._unfold(value)
        self._kept.append(others)
        self._parts.append(first)
        for each in others:
            self._add(each)

    def _unfold(self, value: Any) -> tuple[Any, ...]:
        parts = unfold_exactly(value, self._main_by_name, self._home_of)
        if parts is None:
            raise Beyond(f"{type(value)} is left to pickle")
        return parts

    def _is_again(self, value: object) -> bool:
        """Whether a container came before; if so, writes AGAIN, otherwise records the container."""
        number = self._containers.get(id(value))
        if number is not None:
            self._parts.append(NUMBER.pack(AGAIN, number))
            return True
        self._containers[id(value)] = len(self._containers)
        self._kept.append(value)
        return False

    def _add_other(self, value: Any) -> None:
        if type(value) is Tensor or type(value) is Parameter:
            if value.__dict__:
                raise Beyond("a tensor has attributes")
            self._add_outside(value, self.tensors, TENSOR)
        else:
            self._add_unfolded(value)

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

    def _unfold(self, value: Any) -> tuple[Any, ...]:
        return _UNFOLDERS[type(value)](value)

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


# Values of other kinds are written as their parts: bytes, and values that follow. Both twins do so.


def _unfold_integer(value: int) -> tuple[Any, ...]:
    size = value.bit_length() // 8 + 1
    return (_counted(BIG_INTEGER, size) + value.to_bytes(size, "little", signed=True),)


def _unfold_complex(value: complex) -> tuple[Any, ...]:
    return (COMPLEX_VALUE.pack(COMPLEX, value.real, value.imag),)


def _unfold_ordered(value: OrderedDict[Any, Any]) -> tuple[Any, ...]:
    attributes = vars(value)
    check_attributes(OrderedDict, attributes)
    entries = itertools.chain.from_iterable(value.items())
    return (_counted(ORDERED, len(value)), *entries, dict(attributes))


def _unfold_torch(value: object) -> tuple[Any, ...]:
    name = str(value).encode()
    return (_counted(TORCH, len(name)) + name,)


_UNFOLDERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    int: _unfold_integer,
    complex: _unfold_complex,
    set: lambda value: (_counted(SET, len(value)), *value),
    frozenset: lambda value: (_counted(FROZENSET, len(value)), *value),
    OrderedDict: _unfold_ordered,
    torch.Size: lambda value: (bytes((SIZE,)), tuple(value)),
    **dict.fromkeys(_TORCH_TYPES, _unfold_torch),
}


def unfold_exactly(
    value: Any, main_by_name: bool, home_of: Callable[[Any], ReferenceId | None]
) -> tuple[Any, ...] | None:
    """Returns the parts of a value for ``encode``; None if it has to go by pickle."""
    unfolder = _UNFOLDERS.get(type(value))
    if unfolder is not None:
        try:
            return unfolder(value)
        except ProtocolError:
            return None
    if isinstance(value, _FUNCTION_TYPES):
        name = functions.name_of(value, main_by_name)
        return None if name is None else (_counted(NAME, len(name)) + name,)
    home = home_of(value)
    return None if home is None else (HOME_VALUE.pack(HOME, *home),)


_ADDERS: dict[type, Callable[[ExactEncoder, Any], None]] = {
    type(None): ExactEncoder._add_constant,
    bool: ExactEncoder._add_constant,
    int: ExactEncoder._add_integer,
    float: ExactEncoder._add_float,
    str: ExactEncoder._add_text,
    bytes: ExactEncoder._add_bytes,
    tuple: ExactEncoder._add_tuple,
    list: ExactEncoder._add_list,
    dict: ExactEncoder._add_dictionary,
    set: ExactEncoder._add_container,
    OrderedDict: ExactEncoder._add_container,
    frozenset: ExactEncoder._add_frozenset,
    complex: ExactEncoder._add_unfolded,
    **dict.fromkeys((torch.Size, *_TORCH_TYPES), ExactEncoder._add_unfolded),
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
        return native.encode_values(value, tensors, main_by_name, home_of)
    try:
        return ExactEncoder(tensors, main_by_name, home_of).encode(value)
    except Beyond:
        return None
