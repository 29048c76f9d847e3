"""The callables of a strict worker: functions and classes registered singly, and declared methods.

A list of modules admits everything that they contain, and everything that torch or numpy can be
made to do through them. So a strict worker follows no name, and imports nothing. It looks names up
in a table that the program has filled, entry by entry. A method of a value may be called if its
class declares it, at the place where the method is defined.

Registrations and declarations are kept here by identity. No message can add to them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from torchweft.errors import ArgumentTypeError, NotAllowed
from torchweft.serialize import registry
from torchweft.serialize.functions import describe, name_of, resolve, text_of, without_alias
from torchweft.serialize.registry import remotely_callable

T = TypeVar("T")

REGISTER = "rpc.register"
EXPOSE = "rpc.expose"
OPTION = "RpcBackendOptions(strict=True, callables=({}))"

_exposed: weakref.WeakSet[FunctionType] = weakref.WeakSet()


class Callables:
    """Functions and classes by the names under which other workers call them."""

    def __init__(self, members: Iterable[Any] = ()) -> None:
        self._members: dict[bytes, Any] = {}
        for member in members:
            self.add(member)

    def add(self, function: Any) -> None:
        """Adds a function or class; a new definition replaces an earlier one of the same name.

        Raises:
            ArgumentTypeError: It is not a function or class, or has no name that others could send.
        """
        self._members[_name(function)] = function

    def find(self, name: bytes) -> Any:
        """Returns the function or class with a name, or None."""
        return self._members.get(name)

    def has(self, function: Any) -> bool:
        """Tells whether ``function`` itself was added, under any name."""
        return any(function is member for member in list(self._members.values()))


_registered = Callables()


def register(function: T) -> T:
    """Lets other workers call a function or class of a strict worker; a decorator, or a call.

    The function object is registered, as it is at this moment, under its module and name. As a
    decorator, ``register`` must be the outermost. For functions that are defined elsewhere, call it
    (``rpc.register(torch.nn.Linear)``), or name them in ``RpcBackendOptions(callables=...)``.
    Registering a class lets other workers make objects of it; ``expose`` declares methods. Workers
    that are not strict ignore registrations. Thread-safe.

    Args:
        function: A function or class that other workers can import.

    Returns:
        The same function or class.

    Raises:
        ArgumentTypeError: It is neither, or it has no name that others could send: a lambda, or a
            function that was defined inside another function.

    Example::

        @rpc.register
        def evaluate(batch: torch.Tensor) -> float: ...
    """
    _registered.add(function)
    return function


def expose(method: T) -> T:
    """Lets other workers call a method by reference on a strict worker; a decorator.

    It must be the outermost decorator except for ``staticmethod`` and ``classmethod``. A subclass
    inherits the declaration with the method, but must declare an overriding method again. Names
    that begin with an underscore are refused, except those of operators and calls, such as
    ``__call__``. Workers that are not strict ignore declarations.

    Args:
        method: A function in the body of a class.

    Returns:
        The same method.

    Raises:
        ArgumentTypeError: It is not such a function, or its name is for the class alone.

    Example::

        class Observer:
            @rpc.expose
            def run_episode(self, steps: int) -> torch.Tensor: ...
    """
    function = getattr(method, "__func__", method)
    if not isinstance(function, FunctionType):
        raise ArgumentTypeError(
            f"{EXPOSE} declares methods, and this is a {type(method).__name__}; write it above "
            "the definition of a method"
        )
    parent = function.__qualname__.rpartition(".")[0]
    if not parent or parent.endswith("<locals>"):
        raise ArgumentTypeError(
            f"{EXPOSE} declares methods, and {function.__qualname__} is defined outside of any "
            f"class; use {REGISTER} for functions"
        )
    if not _is_public(function.__name__):
        raise ArgumentTypeError(
            f"{EXPOSE} cannot declare {function.__qualname__}: a name with a leading underscore "
            "is for the class alone; give the method another name"
        )
    _exposed.add(function)
    return method


class StrictNames:
    """The names that one strict worker follows in messages of others. Thread-safe.

    Args:
        members: Functions and classes that this worker registers beside the program's.
        worker: Name of this worker, for error messages.
    """

    def __init__(self, members: Iterable[Any], worker: str) -> None:
        self._own = Callables(members)
        self._worker = worker

    def resolve(self, name: bytes) -> Any:
        """Returns the function that a call names.

        Raises:
            NotAllowed: It is not registered here.
        """
        found = self._find(name)
        if found is None and remotely_callable.has(text_of(name)):
            found = resolve(name)
        return self._refuse_name(name) if found is None else found

    def resolve_value(self, name: bytes) -> Any:
        """Returns a function or class that arguments, results or errors contain.

        Raises:
            NotAllowed: It is neither registered here nor a class of errors of Python or Weft.
        """
        found, text = self._find(name), text_of(name)
        if found is None and (registry.is_error(text) or registry.is_weft_error(text)):
            found = resolve(name)
        return self._refuse_name(name) if found is None else found

    def find_type(self, module: str, path: str) -> Any:
        """Returns the class of errors that a record of an error names.

        Raises:
            NotAllowed: It is neither registered here nor one of Python or Weft.
        """
        return self.resolve_value(f"{without_alias(module)}:{path}".encode())

    def check_called(self, function: Any) -> None:
        """Raises NotAllowed if a function that a message contains may not be called."""
        if not (self._own.has(function) or _registered.has(function)):
            self._refuse_name(describe(function).encode(errors="backslashreplace"))

    def method_of(self, value: Any, name: str) -> Any:
        """Returns a method of a value of this worker that another worker may call.

        Raises:
            NotAllowed: The class of the value does not declare it.
        """
        kind = type(value)
        home = next((base for base in kind.__mro__ if name in vars(base)), None)
        # No getattr: the value and its class may have code for attribute access.
        if home is not None and is_exposed(vars(home)[name]):
            return vars(home)[name].__get__(value, kind)
        self._refuse(
            f"method {name!r} of a {kind.__module__}.{kind.__qualname__}",
            self._why_not(kind, home, name),
        )

    def _why_not(self, kind: type, home: type | None, name: str) -> str:
        if any(is_exposed(vars(base).get(name)) for base in kind.__mro__):
            assert home is not None
            return f"as {home.__qualname__} overrides it without @{EXPOSE}; put that there as well"
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "torchweft"):
            return f"which declares no such method; call a function that does it (@{REGISTER})"
        return f"which the class does not declare; put @{EXPOSE} above its definition"

    def _find(self, name: bytes) -> Any:
        found = self._own.find(name)
        return _registered.find(name) if found is None else found

    def _refuse_name(self, name: bytes) -> NoReturn:
        text = text_of(name)
        module, colon, _ = text.partition(":")
        together = [each for each in registry.REGISTERED_TOGETHER if module.startswith(f"{each}.")]
        if together:
            option = OPTION.format(f"*{together[0]}.CALLABLES, ...")
            self._refuse(text, f"which is not registered there; {together[0]} needs {option}")
        if colon and module not in sys.modules and not module.startswith("torchweft."):
            why = (
                f"whose module is not imported there, so no @{REGISTER} in it has run; import "
                f"{registry.shortened(module)} in that worker before it joins"
            )
        else:
            why = f"which is not registered there; put @{REGISTER} above its definition"
        self._refuse(text, f"{why}, or name it in {OPTION.format('...')}")

    def _refuse(self, what: str, why: str) -> NoReturn:
        shown = registry.shortened(what)
        raise NotAllowed(
            f"worker {self._worker!r} is strict and does not run {shown}, {why}",
            worker=self._worker,
            refused=what,
        )


def is_exposed(attribute: object) -> bool:
    """Tells whether an attribute in the body of a class was declared by ``expose``."""
    function = getattr(attribute, "__func__", attribute)
    return isinstance(function, FunctionType) and function in _exposed


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in registry.USUAL_DUNDERS


def _name(function: Any) -> bytes:
    if not callable(function):
        raise ArgumentTypeError(
            f"{REGISTER} takes functions and classes, and this is a {type(function).__name__}"
        )
    name = name_of(function, main_by_name=True)
    if name is not None:
        return name
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", "<")
    # A decorator runs before the name is bound to the function.
    is_definition = isinstance(function, (FunctionType, type)) and "<" not in path
    if not is_definition or not isinstance(module, str):
        raise ArgumentTypeError(
            f"{describe(function)} has no name by which another worker could call it; define it "
            f"at the top level of a module, and register that ({REGISTER})"
        )
    return f"{without_alias(module)}:{path}".encode()
