"""Converts objects to bytes: a pickle with the tensors and the references taken out.

The default way to pickle a tensor copies its memory and takes some hundred microseconds. Here
tensors are taken out of the pickle, wherever they are (arguments, modules, dataclasses, closures),
and a number replaces each. Objects of registered classes are replaced as well: the layer above
hands on remote references, and has to know of each one.

A value of the closed list of kinds that ``values`` writes needs no pickle. Everything else is tried
with pickle's own pickler, in C, which sends functions and classes by name. Where the receiver could
not import one, cloudpickle pickles everything again and sends such objects by value.
"""

from __future__ import annotations

import copyreg
import functools
import io
import operator
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import cloudpickle
from cloudpickle.cloudpickle import _function_setstate, _make_function
from torch import Tensor

from torchweft.engine.codec import by_value, makers, values
from torchweft.engine.codec.diagnosis import diagnose
from torchweft.engine.codec.functions import (
    MAIN_MODULES,
    load_module,
    name_of,
    resolve,
    text_of,
    unknown,
    without_alias,
)
from torchweft.engine.codec.reducers import (
    is_reduced,
    reduce_tensor,
    reduce_torch,
    set_attributes,
)
from torchweft.engine.codec.tensors import NO_TENSORS, Encoded, encode_tensors, is_dense
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.engine.threads.thread_modes import has_modes
from torchweft.engine.wire.frames import HEADER_BYTES
from torchweft.engine.wire.messages import encode_call
from torchweft.errors import ProtocolError, SerializationError, UnknownFunction
from torchweft.ids import ReferenceId

Kind = TypeVar("Kind")
Reducers = Mapping[type, Callable[[Any], Any]]
_PROTOCOL = 5

_MAIN_NAMES = frozenset(MAIN_MODULES)
_external_types: tuple[type, ...] = ()


class Packed(NamedTuple):
    """An object as bytes, with the objects taken out of it.

    Attributes:
        payload: A pickle or a value, with numbers in place of ``tensors`` and ``externals``; empty
            for None, and for a lone tensor.
        tensors: The tensors in order of first appearance, each once.
        externals: The objects of registered classes in order of first appearance, each once.
    """

    payload: bytes
    tensors: list[Tensor]
    externals: list[object]


def register_external(kind: type[Kind]) -> type[Kind]:
    """Has all instances of ``kind`` taken out of every pickle from now on; a class decorator."""
    global _external_types
    _external_types = (*_external_types, kind)
    makers.leave_to_pickle(kind)
    _may_be_outside.cache_clear()
    return kind


def pack(
    value: object,
    *,
    main_by_name: bool,
    not_by_value: str = "",
    reducers: Reducers | None = None,
    needs_pickle: bool = False,
) -> Packed:
    """Turns an object into bytes, tensors and references.

    Args:
        value: Anything that pickle or cloudpickle can handle, with tensors anywhere in it.
        main_by_name: Whether the receiver runs the same main program, so that the program's
            definitions can go by name.
        not_by_value: Why functions cannot travel by value; empty where they can.
        reducers: A program's own reducers of the pickle protocol by class, subclasses not included.
            They take precedence over everything else.
        needs_pickle: Whether ``values.encode`` is known to leave the value to pickle.

    Raises:
        SerializationError: Some part cannot be sent; the text names it and says what to do.
    """
    if value is None:
        return Packed(b"", [], [])
    if reducers is None and not needs_pickle:
        tensors: list[Tensor] = []
        payload = values.encode(value, tensors, main_by_name)
        if payload is not None and all(map(is_dense, tensors)):
            return Packed(b"" if tensors and value is tensors[0] else payload, tensors, [])
    try:
        return _pickled(value, main_by_name, not_by_value, reducers)
    except NotByValue as error:
        raise SerializationError(str(error)) from None
    except Exception as error:
        if is_of_handler(error):
            raise
        again = functools.partial(_pickled, main_by_name=main_by_name, reducers=reducers)
        raise diagnose(value, error, again) from error


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
    unpickler = _Unpickler(payload, tensors, externals)
    try:
        return unpickler.load()
    except Exception as error:
        raise by_value.not_rebuilt(error)  # noqa: B904
    finally:
        # Its memo may hold the error, whose traceback leads here. Before 3.11 the garbage collector
        # cannot see that cycle, and the message's objects would never be freed.
        del unpickler


def _tensor(number: int) -> Tensor:
    """Stands for tensor ``number`` in a pickle; the reader substitutes its own list."""
    raise ProtocolError("a payload of Weft was read by another unpickler")


def _external(number: int) -> object:
    """Stands for reference ``number`` in a pickle, in the same way."""
    raise ProtocolError("a payload of Weft was read by another unpickler")


def taken_out(
    tensors: Sequence[Tensor], externals: Sequence[object]
) -> dict[tuple[str, str], Callable[[int], object]]:
    """Returns the functions that the globals for taken-out objects stand for, by their names."""
    return {
        (__name__, _tensor.__name__): tensors.__getitem__,
        (__name__, _external.__name__): externals.__getitem__,
    }


class _Unpickler(pickle.Unpickler):
    """Reads what ``_Pickler`` wrote."""

    def __init__(
        self,
        payload: bytes | bytearray | memoryview,
        tensors: Sequence[Tensor],
        externals: Sequence[object],
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._tensors, self._externals = tensors, externals

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _tensor.__name__:
            return self._tensors.__getitem__
        if module == __name__ and name == _external.__name__:
            return self._externals.__getitem__
        if module in MAIN_MODULES:
            module = "__main__"
        try:
            if module not in sys.modules:
                load_module(module)
            return super().find_class(module, name)
        except (AttributeError, ImportError) as error:
            raise unknown(module, name, str(error)) from error


class NotByValue(pickle.PicklingError):
    """A function would have to travel by value, and cannot."""


_BY_CLASS = operator.methodcaller("__reduce_ex__", _PROTOCOL)


def _reduce_ordered(value: OrderedDict[Any, Any]) -> Any:
    # A module has a dozen empty ones, whose own way of pickling would take most of its time.
    return value.__reduce_ex__(_PROTOCOL) if value or value.__dict__ else (OrderedDict, ())


class _Outside(dict[type, Callable[[Any], Any]]):
    """The objects that are taken out of one pickle: tensors, and those of registered classes.

    It is also the table of reducers of a pickler in C. The reducer of a class is chosen at its
    first object.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.externals: list[object] = []

    def __missing__(self, kind: Any) -> Callable[[Any], Any]:
        if _may_be_outside(kind):
            reducer: Callable[[Any], Any] = self._reduce_any
        else:
            usual = _reduce_ordered if kind is OrderedDict else _BY_CLASS
            reducer = copyreg.dispatch_table.get(kind, usual)
        self[kind] = reducer
        return reducer

    def _reduce_any(self, value: Any) -> Any:
        reduced = self.reduce(value)
        if reduced is not NotImplemented:
            return reduced
        return copyreg.dispatch_table.get(type(value), _BY_CLASS)(value)

    def reduce(self, value: Any) -> Any:
        """Takes an object out, or apart as torch's need it; returns NotImplemented for others."""
        if isinstance(value, Tensor):
            return self._reduce_tensor(value)
        if isinstance(value, _external_types):
            self.externals.append(value)
            return _external, (len(self.externals) - 1,)
        reduced = reduce_torch(value)
        return NotImplemented if reduced is None else reduced

    def _reduce_tensor(self, value: Tensor) -> Any:
        reduced = reduce_tensor(value)
        if reduced is None:
            self.tensors.append(value)
            reduced = _tensor, (len(self.tensors) - 1,)
        if reduced is not NotImplemented and len(reduced) == 2 and vars(value):
            return (*reduced, dict(vars(value)), None, None, set_attributes)
        return reduced


@functools.lru_cache(1024)
def _may_be_outside(kind: type) -> bool:
    """Tells whether ``_Outside.reduce`` may take objects of a class out, or apart.

    Raises:
        KeyError: It is a metaclass, whose objects the pickler sends by name.
    """
    if issubclass(kind, type):
        raise KeyError(kind)
    return is_reduced(kind) or issubclass(kind, (Tensor, *_external_types))


def _pickled(
    value: object,
    main_by_name: bool,
    not_by_value: str = "",
    reducers: Reducers | None = None,
) -> Packed:
    # Weft itself registers the main program; see below.
    is_by_name = main_by_name and cloudpickle.list_registry_pickle_by_value() <= _MAIN_NAMES
    if is_by_name and reducers is None:
        try:
            return _pickled_by_name(value)
        except Exception as error:
            if is_of_handler(error):
                raise
            # Some object has no name, or the next attempt fails as well. A local class must not
            # live on here.
            _may_be_outside.cache_clear()
    if not main_by_name and "__mp_main__" in sys.modules:
        # cloudpickle knows the main program only as `__main__`.
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    buffer, outside = io.BytesIO(), _Outside()
    _Pickler(buffer, outside, main_by_name, not_by_value, reducers or {}).dump(value)
    return Packed(buffer.getvalue(), outside.tensors, outside.externals)


def _pickled_by_name(value: object) -> Packed:
    """Pickles a value with pickle's own pickler, in C; raises an error where that cannot."""
    buffer, outside = io.BytesIO(), _Outside()
    pickler = pickle.Pickler(buffer, _PROTOCOL)
    pickler.dispatch_table = outside
    try:
        pickler.dump(value)
    finally:
        outside.clear()  # Its reducers refer to it, and with it to what was taken out.
    return Packed(buffer.getvalue(), outside.tensors, outside.externals)


def _has_name(value: object, name: bytes) -> bool:
    """Tells whether a name still leads to a value: its module may have been loaded again."""
    try:
        return resolve(name) is value
    except UnknownFunction:
        return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes by value where the receiver cannot import them.

    Args:
        buffer: Gets the pickle.
        outside: Takes objects out.
        main_by_name: Whether the receiver runs the same main program.
        not_by_value: Why functions cannot travel by value; empty where they can.
        reducers: A program's own reducers, which are asked first.
    """

    def __init__(
        self,
        buffer: io.BytesIO,
        outside: _Outside,
        main_by_name: bool,
        not_by_value: str,
        reducers: Reducers,
    ) -> None:
        super().__init__(buffer, _PROTOCOL)
        self._outside = outside
        self._main_by_name = main_by_name
        self._not_by_value = not_by_value
        self._reducers = reducers

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if self._reducers and kind in self._reducers:
            return self._reducers[kind](value)
        if kind is FunctionType or isinstance(value, type):
            return self._reduce_definition(value)
        if kind is CodeType:
            return by_value.reduce_code(value)
        reducer = by_value.REDUCERS.get(kind)
        if reducer is not None:
            is_named = name_of(value, self._main_by_name) is not None
            return NotImplemented if is_named else reducer(value)
        return by_value.reduce_module(value) if kind is ModuleType else self._outside.reduce(value)

    def _reduce_definition(self, value: Any) -> Any:
        name = name_of(value, self._main_by_name)
        if name is not None and _has_name(value, name):
            own = f"{without_alias(value.__module__)}:{value.__qualname__}"
            return NotImplemented if text_of(name) == own else (resolve, (name,))
        if type(value) is FunctionType:
            return self._dynamic_function_reduce(value)
        if by_value.is_typed_dict(value):
            return by_value.reduce_typed_dict(value)
        return super().reducer_override(value)

    def _dynamic_function_reduce(self, function: FunctionType) -> Any:
        """Takes the place of cloudpickle's own method, which cloudpickle calls too."""
        if self._not_by_value:
            raise NotByValue(
                f"{self._not_by_value}; put {function.__qualname__!r} into a module that both can "
                "import"
            )
        compiled = by_value.compiler_of(function)
        if compiled is not None:
            return compiled
        parts = self._function_getnewargs(function)
        state = by_value.state_of(function)
        return _make_function, parts, state, None, None, _function_setstate


def plain_frame(
    timeout_s: float,
    creation: int,
    name: bytes,
    span: bytes,
    arguments: tuple[Any, ...],
    tensors: list[Tensor],
    receiver: int,
    home_of: Callable[[Any], ReferenceId | None],
    inlines: bool,
) -> tuple[bytearray, bool] | Literal[False] | None:
    """Returns a call as a frame without its header and the numbers of its graph.

    Args:
        timeout_s: The caller's time limit, in seconds.
        creation: Number of the reference that the result is for.
        name: The name of the function, or empty.
        span: The context of the span that the call carries, or empty.
        arguments: The arguments.
        tensors: An empty list, which gets the tensors.
        receiver: As for ``values.encode``.
        home_of: As for ``values.encode``.
        inlines: Whether tensors may stand in the frame.

    Returns:
        The frame, and whether a tensor requires grad. False for values that go by pickle. None for
        tensors that do not stand in the frame, and for those in torch's modes, where they cannot
        be read.
    """
    payload = values.encode(arguments, tensors, receiver, home_of)
    if payload is None:
        return False
    inlined: Encoded | None = NO_TENSORS
    if tensors:
        inlined = encode_tensors(tensors) if inlines and not has_modes() else None
    if inlined is None:
        return None
    content, requires_grad = inlined
    head = timeout_s, creation, 0, 0, name, span
    return bytearray(HEADER_BYTES) + encode_call(*head, (), payload, content), requires_grad
