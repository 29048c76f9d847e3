"""Converts objects to bytes: a pickle with the tensors and the references taken out.

The default way to pickle a tensor copies its memory and takes some hundred microseconds. Here
tensors are taken out of the pickle, wherever they are (arguments, modules, dataclasses, closures),
and a number replaces each. Objects of registered classes are replaced as well: the layer above
hands on remote references, and has to know of each one.

There are two picklers. The first runs in C, sends functions and classes by name, and works out once
for each class how its instances are taken apart. For receivers that run another main program, it
looks at each function and class. If an object has no name that the other side could import,
cloudpickle pickles everything again and sends such objects by value.

Each taken-out tensor is pickled as a call of one marker. Pickling the marker itself would cost a
microsecond a message. So the pickler's memo already has the marker, as number 0, and every payload
starts with the few instructions that put it into the reader's memo.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import cloudpickle
from torch import Tensor
from torch.nn import Parameter

from torchweft.engine.codec import values
from torchweft.engine.codec.by_value import (
    MARKERS,
    NAMED_TYPES,
    NotByValue,
    Reducers,
    ValuePickler,
    not_rebuilt,
)
from torchweft.engine.codec.diagnosis import diagnose
from torchweft.engine.codec.functions import (
    MAIN_MODULES,
    is_registered_by_value,
    load_module,
    unknown,
)
from torchweft.engine.codec.reducers import (
    is_reduced,
    reduce_tensor,
    reduce_torch,
    reducer_count,
    set_attributes,
)
from torchweft.engine.codec.tensors import is_dense
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import ProtocolError, SerializationError
from torchweft.ids import ReferenceId

Kind = TypeVar("Kind")
_PROTOCOL = 5
_MARKER_MODULE = "torchweft"
_MARKER_NAME = "tensor"

_MAIN_NAMES = frozenset(MAIN_MODULES)
_external_types: tuple[type, ...] = ()


class Packed(NamedTuple):
    """An object as bytes, with the objects taken out of it.

    Attributes:
        payload: A pickle or a value, with numbers in place of ``tensors`` and ``externals``.
        tensors: The tensors in order of first appearance, each once.
        externals: The objects of registered classes in order of first appearance, each once.
    """

    payload: bytes
    tensors: list[Tensor]
    externals: list[object]


# The named tuple's own constructor is Python code.
new_packed = partial(tuple.__new__, Packed)


def register_external(kind: type[Kind]) -> type[Kind]:
    """Has all instances of ``kind`` taken out of every pickle from now on; a class decorator."""
    global _external_types
    if kind not in _external_types:
        _external_types = (*_external_types, kind)
        _name_picklers.clear()
    return kind


def pack(
    value: object,
    *,
    main_by_name: bool,
    not_by_value: str = "",
    reducers: Reducers | None = None,
) -> Packed:
    """Turns an object into bytes, tensors and references.

    Args:
        value: Anything that pickle or cloudpickle can handle, with tensors anywhere in it.
        main_by_name: Whether the receiver runs the same main program, so that the program's
            definitions can go by name.
        not_by_value: Why functions cannot travel by value; empty where they can.
        reducers: A program's own reducers of the pickle protocol by class, subclasses not included.
            They take precedence over everything else.

    Raises:
        SerializationError: Some part cannot be sent; the text names it and says what to do.
    """
    packed: Packed | None = None
    if reducers is None:
        if type(value) in _SIMPLE_TYPES:
            packed = _pack_simple(value)
        if packed is None:
            packed = pack_by_name(value, main_by_name=main_by_name)
        if packed is not None:
            return packed
    # Usually an object has no importable name. With any other cause, this fails too:
    try:
        return _pack_by_value(value, main_by_name, reducers, not_by_value)
    except NotByValue as error:
        raise SerializationError(str(error)) from None
    except Exception as error:
        if is_of_handler(error):
            raise
        again = partial(_pack_by_value, main_by_name=main_by_name, reducers=reducers)
        by_name = partial(pack_by_name, main_by_name=main_by_name)
        raise diagnose(value, error, lambda part: by_name(part) or again(part)) from error


def pack_by_name(value: object, *, main_by_name: bool) -> Packed | None:
    """Does as ``pack`` for a value in which nothing goes by value; None for others."""
    try:
        return _pack_by_name(value, main_by_name)
    except Exception as error:
        if is_of_handler(error):
            raise
        return None


def pack_plain(value: object, *, main_by_name: bool) -> Packed:
    """Does the same as ``pack`` without pickle, for a strict worker.

    Args:
        value: An object of the kinds that ``values`` lists.
        main_by_name: Whether the receiver runs the same main program.

    Raises:
        SerializationError: Some part is of another kind; the text names it and says what to do.
    """
    try:
        return _pack_plain(value, main_by_name)
    except Exception as error:
        if is_of_handler(error):
            raise
        raise diagnose(value, error, lambda part: _pack_plain(part, main_by_name)) from error


def _pack_plain(value: object, main_by_name: bool) -> Packed:
    encoder = values.Encoder(main_by_name, _external_types)
    return Packed(encoder.encode(value), encoder.tensors, encoder.externals)


_SIMPLE_TYPES = frozenset({type(None), bool, int, float, str, bytes, Tensor, Parameter})


def _pack_simple(value: object) -> Packed | None:
    """Packs None, a number, a text, bytes, or a tensor; None if it is unusual."""
    if isinstance(value, Tensor):
        return new_packed((b"", [value], [])) if _is_plain(value) else None
    payload = b"" if value is None else values.encode(value, [], main_by_name=True)
    return None if payload is None else new_packed((payload, [], []))


def unpack(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    externals: Sequence[object],
    come_home: Callable[[ReferenceId], Any] = values.refuse_home,
) -> object:
    """Returns the object that ``pack`` was given on another worker.

    The payload can name and call anything: it must come from a worker that is trusted.

    Raises:
        UnknownFunction: A function or class in it cannot be imported here.
        SerializationError: Rebuilding some object in it failed, also for want of a tensor or
            reference that did not arrive.
        ProtocolError: A value was made with more tensors or references than arrived.
    """
    if not payload:
        return tensors[0] if tensors else None
    if payload[0] != values.PICKLE:
        return values.decode(payload, tensors, externals, come_home=come_home)
    unpickler: _Unpickler | None = None
    try:
        if type(payload) is bytes and _GLOBAL not in payload:
            return pickle.loads(payload)  # Names nothing, so it needs no unpickler of ours.
        unpickler = _Unpickler(io.BytesIO(payload))
        unpickler.tensors = tensors
        unpickler.externals = externals
        return unpickler.load()
    except Exception as error:
        raise not_rebuilt(error)  # noqa: B904
    finally:
        # Its memo may hold the error, whose traceback leads here. Before 3.11 the garbage collector
        # cannot see that cycle, and the message's objects would never be freed.
        del unpickler


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that its memory and its entry in the table fully describe."""
    return (
        (type(value) is Tensor or type(value) is Parameter)
        and is_dense(value)
        and not value.__dict__
    )


def _tensor(number: int) -> Tensor:
    """Stands for tensor ``number`` in a pickle; the reader substitutes its own list."""
    raise ProtocolError("a payload of Weft was read by another unpickler")


def _external(number: int) -> object:
    """Stands for reference ``number`` in a pickle, in the same way."""
    raise ProtocolError("a payload of Weft was read by another unpickler")


def _to_memo(marker: tuple[str, str]) -> bytes:
    """Returns the instructions that look a marker up and put it into the reader's memo."""
    parts = []
    for text in marker:
        parts += [pickle.SHORT_BINUNICODE, bytes([len(text)]), text.encode()]
    return b"".join([*parts, pickle.STACK_GLOBAL, pickle.MEMOIZE, pickle.POP])


TENSOR_MARKER = (_MARKER_MODULE, _MARKER_NAME)
EXTERNAL_MARKER = (__name__, _external.__name__)
"""The globals that stand for the objects taken out of a pickle."""

_GLOBAL = pickle.STACK_GLOBAL
"""The instruction by which a pickle of this module names anything."""
_BEGIN = pickle.PROTO + bytes([_PROTOCOL])
_PREFIX = _BEGIN + _to_memo(TENSOR_MARKER)
_NO_MARKER = b"".join([_BEGIN, pickle.NONE, pickle.MEMOIZE, pickle.POP])
"""The same for a pickle without tensors: the memo begins with an object that nothing uses."""


def _packed(pickled: Sequence[bytes], tensors: list[Tensor], externals: list[object]) -> Packed:
    payload = b"".join((_PREFIX if tensors else _NO_MARKER, *pickled))
    return new_packed((payload, tensors, externals))


_MEMO: Any = {id(_tensor): (0, _tensor)}
_VALUE_MEMO: Any = {
    id(each): (number, each) for number, each in enumerate((_tensor, *MARKERS.values()))
}
_VALUE_MARKERS = b"".join(map(_to_memo, MARKERS))
"""The markers of a pickle with functions by value, behind the one for tensors."""


class _NeedsValue(pickle.PicklingError):
    """A function or class has no name that the receiver can import."""


class _Reducers(dict[type, Any]):
    """Reducers by class for one pickler; the one of a new class is chosen at its first instance.

    Attributes:
        tensors: The tensors taken out so far.
        externals: The other objects taken out so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.externals: list[object] = []
        self.known_count = 0

    def __missing__(self, kind: type) -> Any:
        reducer = self._reducer_for(kind)
        if reducer is None:
            raise KeyError(kind)  # The pickler saves a class by its name.
        self[kind] = reducer
        return reducer

    def _reducer_for(self, kind: type) -> Any:
        if issubclass(kind, type):
            return _by_copyreg if kind in copyreg.dispatch_table else None
        if kind is Tensor or kind is Parameter:
            return self._tensor
        if kind is OrderedDict and kind not in copyreg.dispatch_table:
            return _ordered
        if issubclass(kind, (Tensor, *_external_types)):
            return self._other
        if is_reduced(kind):
            return self._of_torch
        if kind in copyreg.dispatch_table:
            return _by_copyreg
        return _BY_CLASS

    def _tensor(self, value: Tensor) -> Any:
        if not _is_plain(value):
            return self._other(value)
        tensors = self.tensors
        tensors.append(value)
        return _tensor, (len(tensors) - 1,)

    def _other(self, value: Any) -> Any:
        reduced = _take_out(self, value)
        return _by_copyreg(value) if reduced is NotImplemented else reduced

    def _of_torch(self, value: Any) -> Any:
        reduced = reduce_torch(value)
        return _by_copyreg(value) if reduced is None else reduced


_BY_CLASS = operator.methodcaller("__reduce_ex__", _PROTOCOL)


def _ordered(value: OrderedDict[Any, Any]) -> Any:
    # A module has a dozen empty ones, whose own way of pickling would take most of its time.
    if value or value.__dict__:
        return value.__reduce_ex__(_PROTOCOL)
    return OrderedDict, ()


def _by_copyreg(value: Any) -> Any:
    reducer = copyreg.dispatch_table.get(type(value), _BY_CLASS)
    return reducer(value)


class _LookingPickler(pickle.Pickler):
    """Looks whether the receiver finds each function and class by its name."""

    main_by_name = True

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is FunctionType or isinstance(value, type) or kind in NAMED_TYPES:
            module = value.__module__
            if module in MAIN_MODULES:
                if not self.main_by_name:
                    raise _NeedsValue(f"{value!r} is part of the main program")
            elif is_registered_by_value(module):
                raise _NeedsValue(f"module {module!r} goes by value")
        return NotImplemented


class _NamePickler:
    """Pickles functions and classes by name, with a pickler in C that can be used again and again.

    Not thread-safe.

    Args:
        kind: The type of the pickler.
    """

    __slots__ = ("_parts", "_reducers", "pickler", "write")

    def __init__(self, kind: type[pickle.Pickler] = pickle.Pickler) -> None:
        self._parts: list[bytes] = []
        self.write = self._parts.append
        self._reducers = _Reducers()
        self.pickler: Any = kind(self, _PROTOCOL)
        self.pickler.dispatch_table = self._reducers

    def pack(self, value: object) -> Packed:
        reducers, parts = self._reducers, self._parts
        count = len(copyreg.dispatch_table) + reducer_count()
        if reducers.known_count != count:  # The program has registered reducers since.
            reducers.known_count = count
            reducers.clear()
        tensors = reducers.tensors = []
        externals = reducers.externals = []
        self.pickler.memo = _MEMO
        try:
            self.pickler.dump(value)
            return _packed(parts, tensors, externals)
        except BaseException:
            reducers.clear()  # A local class, which goes by value, must not live on here.
            raise
        finally:
            # Its memo would keep the objects of the message alive.
            self.pickler.clear_memo()
            parts.clear()
            reducers.tensors, reducers.externals = [], []


_name_picklers: list[_NamePickler] = []
"""Picklers that no thread uses now."""


class _Unpickler(pickle.Unpickler):
    """Reads what the picklers above wrote."""

    __slots__ = ("externals", "tensors")

    tensors: Sequence[Tensor]
    externals: Sequence[object]

    def find_class(self, module: str, name: str) -> Any:
        if module == _MARKER_MODULE:
            if name == _MARKER_NAME:
                return self.tensors.__getitem__
            if (module, name) in MARKERS:
                return MARKERS[module, name]
        if module == __name__ and name == _external.__name__:
            return self.externals.__getitem__
        if module in MAIN_MODULES:
            module = "__main__"
        try:
            if module not in sys.modules:
                load_module(module)
            return super().find_class(module, name)
        except (AttributeError, ImportError) as error:
            raise unknown(module, name, str(error)) from error


def _take_out(pickler: ValuePickler | _Reducers, value: Any) -> Any:
    """Reduces anything but functions and classes, for all picklers."""
    if isinstance(value, Tensor):
        reduced = reduce_tensor(value)
        if reduced is None:
            pickler.tensors.append(value)
            reduced = (_tensor, (len(pickler.tensors) - 1,))
        if reduced is not NotImplemented and len(reduced) == 2 and vars(value):
            return (*reduced, dict(vars(value)), None, None, set_attributes)
        return reduced
    if isinstance(value, _external_types):
        pickler.externals.append(value)
        return _external, (len(pickler.externals) - 1,)
    reduced = reduce_torch(value)
    return NotImplemented if reduced is None else reduced


def _pack_by_name(value: object, main_by_name: bool) -> Packed:
    # Weft itself registers the main program; see ``_pack_by_value``.
    if main_by_name and cloudpickle.list_registry_pickle_by_value() <= _MAIN_NAMES:
        try:
            pickler = _name_picklers.pop()
        except IndexError:
            pickler = _NamePickler()
        try:
            return pickler.pack(value)
        finally:
            _name_picklers.append(pickler)
    looking = _NamePickler(_LookingPickler)
    looking.pickler.main_by_name = main_by_name
    return looking.pack(value)


def _pack_by_value(
    value: object,
    main_by_name: bool,
    reducers: Reducers | None = None,
    not_by_value: str = "",
) -> Packed:
    if not main_by_name and "__mp_main__" in sys.modules:
        # cloudpickle knows the main program only as `__main__`.
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    buffer = io.BytesIO()
    pickler = ValuePickler(buffer, _PROTOCOL)
    pickler.reducers, pickler.not_by_value = reducers or {}, not_by_value
    pickler.memo = _VALUE_MEMO
    pickler.tensors, pickler.externals = [], []
    pickler.main_by_name = main_by_name
    pickler.take_out = _take_out
    pickler.dump(value)
    parts = (_VALUE_MARKERS, buffer.getvalue())
    return _packed(parts, pickler.tensors, pickler.externals)
