"""Takes common objects apart into a function and its arguments, which need no pickle.

A pickle of a small object takes longer than all the rest of its call. So objects of the usual kinds
go as the call that makes them: those of the standard library by its constructors, arrays and paths
by Weft's own functions, and objects of a program's classes by ``_instance``, ``_record`` or
``_member``. The last three are for classes that pickle would treat in its default way. Objects of
other classes go by pickle: of those with a hook of their own (``__reduce__``, ``__setstate__`` and
the like), and of those whose name does not lead to them.

A reader that takes pickles makes these objects, none of which runs code of a program, whatever its
arguments. It gets a class by its own rules for names.
"""

from __future__ import annotations

import copyreg
import datetime
import enum
import functools
import importlib
import pathlib
import struct
import sys
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any

import numpy as np

from torchweft.engine.codec import registry
from torchweft.engine.codec.functions import resolve
from torchweft.engine.codec.reducers import is_reduced, reduce_torch
from torchweft.errors import ProtocolError, SerializationError

Parts = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and the arguments with which it makes an object."""

_HOOKS = frozenset(
    "__reduce_ex__ __reduce__ __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__ "
    "__getattr__ __getattribute__".split()
)
"""Members by which a class changes how pickle treats its objects."""
_FROM_PYTHON = 1 << 9
"""The flag of classes that are not compiled into the interpreter."""


NO_MAKERS = 2
"""Beside ``main_by_name`` (1) in the description of a receiver: it refuses what is made here."""

_REDUCE_MEMBER: Any = enum.Enum.__reduce_ex__
_PLAINLY_REDUCED = (np.generic, np.dtype, pathlib.PurePath)
_WEFT = "torchweft."
"""The beginning of modules whose classes go by pickle: readers with an allow-list know which."""
_left_to_pickle: tuple[type, ...] = ()


class _Plain:
    pass


class _Bare:
    __slots__ = ()


def leave_to_pickle(kind: type) -> None:
    """Has objects of a class and its subclasses go by pickle from now on."""
    global _left_to_pickle
    _left_to_pickle = (*_left_to_pickle, kind)


def made_parts(value: Any) -> Parts | None:
    """Returns the parts of an object; None if it has to go by pickle."""
    kind = type(value)
    take_apart = _TAKEN_APART.get(kind)
    if take_apart is not None:
        return take_apart(value)
    module: object = kind.__module__
    if type(module) is not str:
        return None
    take_apart = _NUMBERS.get((module, kind.__qualname__))
    if take_apart is not None and _has_name(kind):
        return take_apart(value)
    if kind is np.ndarray or issubclass(kind, _PLAINLY_REDUCED):
        reduced: Any = reduce_torch(value)
        return reduced if is_rebuilt(reduced) else None
    is_own = module.startswith(_WEFT) or issubclass(kind, _left_to_pickle)
    if is_own or is_reduced(kind) or kind in copyreg.dispatch_table or not _has_name(kind):
        return None
    if is_instance_kind(kind):
        return _instance, (kind, vars(value) if kind.__dictoffset__ else _values_in_slots(value))
    if is_record_kind(kind):
        return _record, (kind, tuple(value))
    if isinstance(value, enum.Enum) and kind.__reduce_ex__ is _REDUCE_MEMBER:
        name = value._name_
        return (_member, (kind, name)) if kind.__members__.get(name) is value else None
    return None


def is_rebuilt(reduced: Any) -> bool:
    """Whether a reduced value is a call that any reader makes, and nothing else."""
    is_call = isinstance(reduced, tuple) and len(reduced) == 2
    return is_call and registry.rebuilds_plain.has(name_in(reduced[0]))


def name_in(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of a class, in a message."""
    return f"{function.__module__}:{function.__qualname__}"


def made_plainly(name: bytes, arguments: object) -> Any:
    """Makes an object for any reader: its name has to be marked ``rebuilds_plain``.

    Raises:
        ProtocolError: The name is another one, or the arguments are no tuple.
    """
    text = name.decode("utf-8", "surrogatepass")
    if not registry.rebuilds_plain.has(text):
        raise ProtocolError(f"a message has an object made by {text!r}")
    return resolve(name)(*_checked(arguments))


def made_of(name: bytes, arguments: object) -> Any:
    """Makes an object for a reader that takes pickles; see ``made_plainly``."""
    maker = _MAKERS.get(name)
    return made_plainly(name, arguments) if maker is None else maker(*_checked(arguments))


def _checked(arguments: object) -> tuple[Any, ...]:
    if type(arguments) is not tuple:
        raise ProtocolError("the arguments in a message are no tuple")
    return arguments


def is_instance_kind(kind: type) -> bool:
    """Whether objects of a class are a dict of attributes, or slots, and pickle agrees."""
    makes: Any = kind.__new__
    if makes is not object.__new__:
        return False
    is_like = kind.__dictoffset__ == _Plain.__dictoffset__
    is_like = is_like and kind.__basicsize__ == _Plain.__basicsize__
    if not is_like and not _is_slotted(kind):
        return False
    for base in kind.__mro__[:-1]:
        if not base.__flags__ & _FROM_PYTHON or not _HOOKS.isdisjoint(vars(base)):
            return False
    return True


@functools.lru_cache(256)
def _is_slotted(kind: type) -> bool:
    """Whether objects of a class are slots, and nothing else."""
    size = _Bare.__basicsize__ + len(slots_of(kind)) * struct.calcsize("P")
    return kind is not object and not kind.__dictoffset__ and kind.__basicsize__ == size


@functools.lru_cache(256)
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Returns the members that ``__slots__`` of a class and of its bases have made, by name."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    }


def _values_in_slots(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    missing = object()
    values = {name: getattr(value, name, missing) for name in slots_of(kind)}
    return {name: each for name, each in values.items() if each is not missing}


def is_record_kind(kind: type) -> bool:
    """Whether a class is one of ``typing.NamedTuple`` or ``collections.namedtuple``."""
    members = vars(kind)
    is_record = kind.__bases__ == (tuple,) and "_fields" in members
    return is_record and {"__getnewargs__"} == _HOOKS.intersection(members)


def _has_name(kind: type) -> bool:
    """Whether a class is found by its name; its module may have been loaded again."""
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__dict__", {}).get(kind.__qualname__) is kind


@functools.lru_cache(256)
def _is_known_instance_kind(kind: Any) -> bool:
    return isinstance(kind, type) and is_instance_kind(kind)


def _instance(kind: Any, attributes: Any) -> Any:
    if not _is_known_instance_kind(kind) or type(attributes) is not dict:
        raise ProtocolError(f"a message has an object of {kind!r}, which goes by pickle")
    made = kind.__new__(kind)
    if not kind.__dictoffset__:
        slots = slots_of(kind)
        for name, each in attributes.items():
            if name not in slots:
                raise SerializationError(f"{kind!r} has no slot {name!r} on this worker")
            slots[name].__set__(made, each)
        return made
    for name, each in attributes.items():
        vars(made)[sys.intern(name) if type(name) is str else name] = each
    return made


def _record(kind: Any, items: Any) -> Any:
    if not isinstance(kind, type) or not is_record_kind(kind) or type(items) is not tuple:
        raise ProtocolError(f"a message has a named tuple of {kind!r}, which is no class of them")
    return kind.__new__(kind, *items)


def _member(kind: Any, name: Any) -> Any:
    if not isinstance(kind, enum.EnumMeta) or type(name) is not str:
        raise ProtocolError(f"a message has a member of {kind!r}, which is no enumeration")
    found = kind.__members__.get(name)
    if found is None:
        raise SerializationError(f"{kind!r} has no member {name!r} on this worker")
    return found


def _decimal(text: Any) -> Any:
    return importlib.import_module("decimal").Decimal(text)


def _fraction(numerator: Any, denominator: Any) -> Any:
    return importlib.import_module("fractions").Fraction(numerator, denominator)


def _take_id_apart(value: uuid.UUID) -> Parts | None:
    is_usual = value.is_safe is uuid.SafeUUID.unknown
    return (uuid.UUID, (None, None, None, None, value.int)) if is_usual else None


def _take_time_apart(value: Any) -> Parts:
    kind, arguments = value.__reduce_ex__(4)[:2]
    return kind, arguments


_TAKEN_APART: dict[type, Callable[[Any], Parts | None]] = {
    bytearray: lambda value: (bytearray, (bytes(value),)),
    range: lambda value: (range, (value.start, value.stop, value.step)),
    slice: lambda value: (slice, (value.start, value.stop, value.step)),
    defaultdict: lambda value: (defaultdict, (value.default_factory, dict(value))),
    Counter: lambda value: (Counter, (dict(value),)),
    deque: lambda value: (deque, (list(value), value.maxlen)),
    uuid.UUID: _take_id_apart,
    **dict.fromkeys(
        (datetime.date, datetime.time, datetime.datetime, datetime.timedelta), _take_time_apart
    ),
    datetime.timezone: lambda value: (datetime.timezone, value.__getinitargs__()),
}
_NUMBERS: dict[tuple[str, str], Callable[[Any], Parts | None]] = {
    ("decimal", "Decimal"): lambda value: (_decimal, (str(value),)),
    ("fractions", "Fraction"): lambda value: (_fraction, (value.numerator, value.denominator)),
}
"""Kinds by module and name: few programs need these modules, so they are not imported here."""
_OWN: tuple[Callable[..., Any], ...] = (_instance, _record, _member, _decimal, _fraction)
_KINDS: tuple[Callable[..., Any], ...] = tuple(_TAKEN_APART)
_MAKERS = {name_in(maker).encode(): maker for maker in (*_OWN, *_KINDS)}
