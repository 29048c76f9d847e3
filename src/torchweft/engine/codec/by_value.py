"""Sends functions and classes by value, where the receiver cannot import them.

cloudpickle writes a function whole: its code, and the globals, cells and defaults that it refers
to. The captured values may change at any time, and are sent anew with each call. Nothing is
remembered, so nothing can be outdated; and each call gets a new function with code of its own, as
``torch.compile`` keeps its results with the code object.

This module finds the submodules that a function uses: cloudpickle takes a millisecond for that
where a function refers to ``torch``, as it looks through all modules. And it reduces the objects
that cloudpickle cannot take apart.
"""

from __future__ import annotations

import functools
import marshal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NewType, ParamSpec
from weakref import WeakKeyDictionary

from cloudpickle import cloudpickle

from torchweft.engine.codec.functions import MAIN_MODULES, is_registered_by_value, load_module
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import SerializationError, WeftError

_ATTRIBUTES = (
    *("__name__", "__qualname__", "__module__", "__doc__"),
    *("__annotations__", "__defaults__", "__kwdefaults__", "__closure__"),
)


def state_of(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what cloudpickle restores of a function: its attributes, and all other parts."""
    names: Iterable[str] = cloudpickle._extract_code_globals(function.__code__)
    known = function.__globals__
    used = {name: known[name] for name in names if name in known}
    captured = [*used.values(), *map(_content_of, function.__closure__ or ())]
    modules = [value for value in captured if type(value) is ModuleType]
    state = {name: getattr(function, name) for name in _ATTRIBUTES}
    state["_cloudpickle_submodules"] = list(_submodules(function.__code__, modules))
    state["__globals__"] = used
    return dict(vars(function)), state


def reduce_code(code: CodeType) -> Any:
    """Reduces a code object with its file, which tracebacks show and cloudpickle leaves out."""
    try:
        return marshal.loads, (marshal.dumps(code),)
    except ValueError:  # A program has put a constant into it that the compiler does not make.
        return NotImplemented


def _content_of(cell: Any) -> object:
    """Returns the value in a cell, or None."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _submodules(code: CodeType, modules: Iterable[ModuleType]) -> Iterator[ModuleType]:
    """Yields the imported submodules that code refers to as attributes of modules."""
    parents = [module.__name__ for module in modules if getattr(module, "__package__", None)]
    while parents:
        parent = parents.pop()
        for name in code.co_names:
            child = f"{parent}.{name}"
            module = sys.modules.get(child)
            if module is not None:
                yield module
                parents.append(child)


def compiler_of(function: FunctionType) -> Any:
    """Reduces a function that ``torch.compile`` made of another one; returns None for others."""
    original = vars(function).get("_torchdynamo_orig_callable")
    if original is None:
        return None
    contents = map(_content_of, function.__closure__ or ())
    # Its class reduces itself, for compiled modules.
    contexts = (each for each in contents if type(each).__name__ == "OptimizeContext")
    context = next(contexts, None)
    return None if context is None else (context, (original,))


def reduce_module(module: ModuleType) -> Any:
    """Reduces a module that other workers import, or that only its parent has.

    Extensions written in C make the latter.
    """
    name = module.__name__
    if name in sys.modules:
        is_whole = is_registered_by_value(name) and name not in MAIN_MODULES
        return NotImplemented if is_whole else (load_module, (name,))
    parent, _, attribute = name.rpartition(".")
    home = sys.modules.get(parent)
    is_found = getattr(home, attribute, None) is module
    return (getattr, (home, attribute)) if is_found else NotImplemented


def not_rebuilt(error: Exception) -> Exception:
    """Returns the error of a received object that cannot be made; itself if it tells the cause."""
    if isinstance(error, WeftError) or is_of_handler(error):
        return error
    text = f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
    made = SerializationError(text)
    made.__cause__ = error
    return made


# Objects beside functions and classes that a program defines, which pickle takes for globals of
# their module, or cannot take apart. Type variables are among the annotations of functions.


def make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Makes a function with an empty cache; see ``functools.lru_cache``."""
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _reduce_cached(cached: Any) -> Any:
    return make_cached, (cached.__wrapped__, cached.cache_parameters())


def _reduce_new_type(kind: Any) -> Any:
    return NewType, (kind.__qualname__, kind.__supertype__), vars(kind)


def _reduce_by_name_alone(variable: Any) -> Any:
    return type(variable), (variable.__name__,)


def _reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    # Until Python 3.12 it has a lock.
    state = {name: part for name, part in vars(value).items() if name != "lock"}
    return type(value), (value.func,), state


def _reduce_weak_keys(values: WeakKeyDictionary[Any, Any]) -> Any:
    return type(values), (dict(values),)  # functools.singledispatch has one.


def make_typed_dict(meta: Any, name: str, namespace: dict[str, Any], keys: dict[str, Any]) -> Any:
    """Makes a ``TypedDict``; cloudpickle gives it a base class that it must not have."""
    made = meta(name, (), namespace)
    for key, value in keys.items():
        setattr(made, key, value)
    return made


def is_typed_dict(kind: type) -> bool:
    """Tells whether a class is a ``TypedDict``."""
    return type(kind).__name__ == _TYPED_DICT_META


def reduce_typed_dict(kind: Any) -> Any:
    """Reduces a ``TypedDict`` that has no name in a module."""
    names = "__module__", "__qualname__", "__doc__", "__annotations__"
    namespace = {name: getattr(kind, name) for name in names}
    keys = {name: getattr(kind, name) for name in _KEYS_OF_TYPED_DICT}
    return make_typed_dict, (type(kind), kind.__name__, namespace, keys)


_KEYS_OF_TYPED_DICT = "__total__", "__required_keys__", "__optional_keys__"
_TYPED_DICT_META = "_TypedDictMeta"
"""The name of its type, in ``typing`` and ``typing_extensions``."""

REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(int)): _reduce_cached,
    NewType: _reduce_new_type,
    functools.cached_property: _reduce_cached_property,
    WeakKeyDictionary: _reduce_weak_keys,
    **dict.fromkeys(
        (ParamSpec, *filter(None, [getattr(typing, "TypeVarTuple", None)])), _reduce_by_name_alone
    ),
}
"""Reducers for objects that have no name in a module, by type."""
