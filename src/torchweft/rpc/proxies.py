"""Proxies of values on other workers: their methods, and what the caller knows of a value's class.

``remote(worker, Model, ...)`` names the class of the value. A method that such a value cannot have
is refused at once. A name that is not in the class may still be an attribute of the object, set by
``__init__`` or by any other method. So a name counts as missing only if no method of the class can
set it.

Python looks a name up before it calls it, so ``proxy.name`` may begin a call, or may be all that is
wanted. Where the class is known, and has no method of that name, the owner is asked for the value;
once for each class, if the value is called. Otherwise each name is taken for a method. The object
that stands for a method has neither truth nor equality, so that it cannot be mistaken for the value
of an attribute.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from inspect import CO_COROUTINE
from types import CodeType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn

from torchweft.arguments import UNSET_RPC_TIMEOUT
from torchweft.engine.codec.registry import remotely_callable
from torchweft.engine.codec.tracebacks import shorten
from torchweft.engine.worker.references import Handle
from torchweft.errors import ArgumentTypeError, MethodNotFound
from torchweft.rpc.calls import CALL_METHOD, use
from torchweft.rpc.serving import WhenReady, check_called, check_types, method_of, owned

LIMIT_MARK = "_weft_timeout_s"
"""The attribute of a method that has the time limit of its calls, in seconds."""
CONSTRUCT = b"torchweft.rpc.proxies:construct"
_READ = b"torchweft.rpc.proxies:read"


class Proxy:
    """Calls the methods of a referenced value on the worker that owns it.

    Args:
        reference: The reference to the value.
        way: ``sync``, ``async`` or ``remote``: what a method returns.
        timeout: Seconds for each call; 0 for no limit, -1 for the worker's ``rpc_timeout``.
    """

    def __init__(self, reference: Handle, way: str, timeout: float) -> None:
        # The attributes of a proxy are the value's, and cannot be set.
        own = self.__dict__
        own["_reference"], own["_way"], own["_timeout"] = reference, way, timeout

    def __getattr__(self, name: str) -> Any:
        value_type = known_type(self._reference)
        if value_type is None or callable(getattr(value_type, name, None)):
            return Method(self._call, name)
        try:
            return self._attribute(value_type, name)
        except Exception as error:
            shorten(error)
            raise

    def _attribute(self, value_type: type, name: str) -> Any:
        """Returns what a name means that is no method of the class."""
        check_method(self._reference, name)
        called = _called.setdefault(value_type, set())
        if self._way == "sync" and not name.startswith("_") and name not in called:
            is_called, value = self._read(name)
            if not is_called:
                return value
            called.add(name)
        return Method(self._call, name)

    def _read(self, name: str) -> tuple[bool, Any]:
        found: tuple[bool, Any] = use(
            self._reference, "sync", _READ, (name,), {}, self._timeout, name
        )
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"attribute {name!r} of {self._reference!r} cannot be set through a proxy; call a "
            "method of the value that sets it"
        )

    def __dir__(self) -> list[str]:
        value_type = known_type(self._reference)
        return [] if value_type is None else methods_of(value_type)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself."""
        return self._call("__call__", *args, **kwargs)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        reference, timeout = self._reference, self._timeout
        if timeout is UNSET_RPC_TIMEOUT:
            timeout = limit_of_method(getattr(known_type(reference), name, None))
        try:
            args = (name, *args)
            return use(reference, self._way, CALL_METHOD, args, kwargs, timeout, name)
        except Exception as error:
            shorten(error)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return Proxy, (self._reference, self._way, self._timeout)

    def __repr__(self) -> str:
        return f"RRef({self._reference.address()}).rpc_{self._way}()"


_called: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()
"""Names of attributes that were found to be callable, by the class of their object."""


class Method(functools.partial[Any]):
    """What stands for a method of a referenced value, until it is called."""

    __slots__ = ()

    def _refuse(self, _: object = None) -> NoReturn:
        reference, name = self.func.__self__._reference, self.args[0]  # type: ignore[attr-defined]
        way = f"reference.rpc_sync().{name}"
        if known_type(reference) is None:
            way = (
                f"rpc_sync(reference.owner(), lambda each: each.local_value().{name}, (reference,))"
            )
        raise ArgumentTypeError(
            f"{name!r} of {reference!r} stands for a method here, which is to be called; the value "
            f"of an attribute is read by {way}"
        )

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __int__ = __float__ = __index__ = __len__ = __iter__ = _refuse
    __hash__ = functools.partial.__hash__

    def __repr__(self) -> str:
        return f"<method {self.args[0]!r} of {self.func.__self__!r}>"  # type: ignore[attr-defined]


@remotely_callable
def read(creator: int, owner: int, number: int, kept: object, name: str) -> WhenReady:
    """Returns whether an attribute of the value behind a reference is callable; if not, itself."""
    check_types(name=(name, str))

    def look(value: Any) -> tuple[Callable[..., Any], tuple[bool, Any]]:
        found = method_of(value, name)
        return read, (True, None) if callable(found) else (False, found)

    return WhenReady(owned((creator, owner, number)), look, kept)


def limit_of_method(method: object) -> float:
    """Returns the time limit that a method was given by its class, as ``rpc_sync`` takes it."""
    limit_s: float = getattr(method, LIMIT_MARK, UNSET_RPC_TIMEOUT)
    return limit_s


# Classes whose constructor is a coroutine


def is_made_by_coroutine(kind: type) -> bool:
    """Whether the ``__init__`` of a class is an ``async def``."""
    code = getattr(kind.__init__, "__code__", None)  # type: ignore[misc]
    return code is not None and code.co_flags & CO_COROUTINE != 0


@remotely_callable
async def construct(kind: Any, args: Any, kwargs: Any) -> Any:
    """Makes an object whose ``__init__`` is an ``async def``."""
    check_types(kind=(kind, type), args=(args, (tuple, list)), kwargs=(kwargs, dict))
    check_called(kind)
    made = kind.__new__(kind, *args, **kwargs)
    await made.__init__(*args, **kwargs)
    return made


# The caller's knowledge of a referenced value

_ANSWERS = frozenset("__getattr__ __getattribute__ __setattr__".split())
"""Methods of a class that may make any name an attribute."""
_SETS = _ANSWERS | frozenset("__dict__ add_module register_module setattr vars".split())
"""Names by which a method can set attributes that its code does not name."""
_WITHOUT_OWN = (object, nn.Module)
"""Classes whose own methods set no callable attributes, except through the names above."""


def known_type(reference: Handle) -> type | None:
    """Returns the class of the value behind a reference, where this worker knows it."""
    made_by: type | None = getattr(reference, "value_type", None)
    return made_by


def check_method(reference: Handle, name: str) -> None:
    """Raises MethodNotFound if the value is known to have no such method."""
    value_type = known_type(reference)
    if value_type is None or hasattr(value_type, name):
        return
    if not is_made_plainly(value_type) or may_set(value_type, name):
        return
    text = f"{value_type.__qualname__!r} object has no attribute {name!r}: "
    text += f"value of RRef({reference.address()})"
    close = difflib.get_close_matches(name, methods_of(value_type), 1)
    raise MethodNotFound(f"{text}; did you mean {close[0]!r}?" if close else text)


def is_made_plainly(value_type: type) -> bool:
    """Whether calling a class is just ``object.__new__`` and its ``__init__``."""
    new: Any = value_type.__new__
    return type(value_type).__call__ is type.__call__ and new is object.__new__


def methods_of(value_type: type) -> list[str]:
    """Returns the names of the public methods of a class."""
    return [
        name
        for name in dir(value_type)
        if not name.startswith("_") and callable(getattr(value_type, name, None))
    ]


@functools.lru_cache(maxsize=256)
def may_set(value_type: type, name: str) -> bool:
    """Whether methods of a class may give its objects an attribute of that name."""
    for base in value_type.__mro__:
        if base in _WITHOUT_OWN:
            continue
        held = vars(base)
        if name in held.get("__annotations__", ()) or not _ANSWERS.isdisjoint(held):
            return True
        for code in _codes_of(held.values()):
            used = code.co_names
            # A constant may be the name of an annotation, or an argument of setattr elsewhere.
            if name in used or name in code.co_consts or not _SETS.isdisjoint(used):
                return True
    return False


def _codes_of(attributes: Any) -> Iterator[CodeType]:
    """Yields the code of all functions among the attributes of a class, with nested code."""
    todo = list(attributes)
    while todo:
        each = todo.pop()
        if isinstance(each, CodeType):
            yield each
            todo += [part for part in each.co_consts if isinstance(part, CodeType)]
        elif isinstance(each, property):
            todo += [each.fget, each.fset]
        else:
            held = [getattr(each, name, None) for name in ("__code__", "__func__", "__wrapped__")]
            todo += [part for part in held if part is not None]
