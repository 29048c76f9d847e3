"""Sends callables by name.

A function that the other side can import is sent as ``b"module:path"``. Both directions are cheap
after the first time. The caller caches the name of each callable until the callable dies. The
callee caches the object that holds the callable, and looks up the name's last part on every call: a
function that is replaced in its module is found at once.
"""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from torchweft.arguments import did_you_mean
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import UnknownFunction

MAIN_MODULES = ("__main__", "__mp_main__")
"""The program itself; multiprocessing gives it the second name in the processes it spawns."""

_MAIN_PREFIX = b"__main__:"
_KNOWN_NAMES_LIMIT = 4096

# Keyed by id, because a callable may be unhashable or define its own equality. The reference
# reveals an id that was given to another object, and removes the entry with its callable.
_names: dict[int, tuple[Callable[[], object], bytes]] = {}


def name_of(function: Callable[..., object], main_by_name: bool) -> bytes | None:
    """Returns the name under which another worker finds ``function``.

    Args:
        function: Any callable.
        main_by_name: Whether the other worker runs the same main program.

    Returns:
        The name, or None for callables that have to travel by value: lambdas, closures, methods of
        an object, and definitions of ``__main__`` if the receiver runs another program.
    """
    known = _names.get(id(function))
    if known is not None and known[0]() is function:
        name = known[1]
    else:
        found = _find_name(function)
        if found is None:
            return None
        name = found
        _remember(function, name)
    if not main_by_name and name.startswith(_MAIN_PREFIX):
        return None
    return name


def resolve(name: bytes) -> Callable[..., object]:
    """Returns the callable for a name that ``name_of`` returned on another worker.

    Raises:
        UnknownFunction: This worker cannot import the module, or the module lacks the name.
    """
    parent, attribute = locate(name)
    try:
        return getattr(parent, attribute)  # type: ignore[no-any-return]
    except AttributeError:
        module, _, path = text_of(name).partition(":")
        reason = "it has no such attribute" + did_you_mean(attribute, dir(parent))
        raise unknown(module, path, reason) from None


def describe(function: object) -> str:
    """Returns a readable name of any callable, for messages."""
    if isinstance(function, partial):
        return f"partial({describe(function.func)})"
    if callable(function):
        found = name_of(function, main_by_name=True)
        if found is not None:
            return own_name(text_of(found))
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(name, str):
        return f"{type(function).__module__}.{type(function).__qualname__} object"
    module = getattr(function, "__module__", None)
    return own_name(f"{module}.{name}" if isinstance(module, str) else name)


def own_name(name: str) -> str:
    """Returns the program's name for the function that another worker finds by ``name``."""
    return name.partition(UNWRAPPED)[0].replace(":", ".")


UNWRAPPED = "__parallelize"
"""Follows the name of a function in that of its original, where ``mapreduce.parallelize`` wraps
it."""


def unknown(module: str, path: str, reason: str) -> UnknownFunction:
    """Makes the error for a function or class that this worker does not have."""
    if module in MAIN_MODULES:
        advice = "the main programs of the two workers differ; move it to a module that both import"
    else:
        advice = (
            "the RPC pickler does not serialize the code of what a module defines, so make module "
            f"{module!r} importable on this worker (same version, same PYTHONPATH), and define the "
            "name at the top level of that module"
        )
    end = " If not:" if reason.endswith("?") else ";"
    return UnknownFunction(f"cannot find {path!r} in module {module!r}: {reason}{end} {advice}")


def find_global(module: str, path: str) -> object:
    """Imports ``module`` and follows the dotted ``path`` in it.

    Raises:
        UnknownFunction: The import or the lookup fails here.
    """
    found = import_module(module, path)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise unknown(module, path, str(error) + did_you_mean(part, dir(found))) from None
    return found


@lru_cache(maxsize=4096)
def locate(name: bytes) -> tuple[object, str]:
    """Returns the object that has the callable as an attribute, and the attribute's name."""
    module, separator, path = text_of(name).partition(":")
    if not separator or not module or not path:
        raise UnknownFunction(f"{name!r} is no name of a function; it should be module:name")
    parent, _, attribute = path.rpartition(".")
    return (find_global(module, parent) if parent else import_module(module, path)), attribute


def text_of(name: bytes) -> str:
    """Returns the name of a function in a message, for messages of errors."""
    return bytes(name).decode("utf-8", "backslashreplace")


def import_module(module: str, path: str) -> object:
    """Returns a module; ``path`` is the name wanted in it, for the error message.

    Raises:
        UnknownFunction: The module cannot be imported here.
    """
    try:
        return load_module(module)
    except Exception as error:
        if is_of_handler(error):
            raise
        reason = f"importing the module fails with {type(error).__name__}: {error}"
        raise unknown(module, path, reason) from error


def load_module(module: str) -> object:
    """Imports a module after its parent packages; the main program needs no import.

    Python locks a module before its package, and a package may import the module. So two threads
    that import one each would wait for each other; Python gives one of them an incomplete module.
    """
    if module in MAIN_MODULES:
        return sys.modules["__main__"]
    end = module.find(".")
    while end > 0:
        importlib.import_module(module[:end])
        end = module.find(".", end + 1)
    return importlib.import_module(module)


def _remember(function: Callable[..., object], name: bytes) -> None:
    if isinstance(function, types.MethodType):
        return  # a class method: each access makes a new object
    key = id(function)
    try:
        reference = weakref.ref(function, lambda _: _names.pop(key, None))
    except TypeError:
        return
    if len(_names) < _KNOWN_NAMES_LIMIT:
        _names[key] = (reference, name)


def without_alias(module: str) -> str:
    """Returns the name of a module; for the program itself, its usual one."""
    return "__main__" if module in MAIN_MODULES else module


def is_registered_by_value(module: object) -> bool:
    """Tells whether the user told cloudpickle to send a module's definitions by value."""
    registered: set[str] = cloudpickle.list_registry_pickle_by_value()
    if not registered or not isinstance(module, str):
        return False
    return any(module == name or module.startswith(f"{name}.") for name in registered)


def _find_name(function: object) -> bytes | None:
    if type(function) is FunctionType and _is_nameless(function):
        return None
    for module, path in _candidates(function):
        if is_registered_by_value(module) and module not in MAIN_MODULES:
            return None
        if _is_there(module, path, function):
            return f"{without_alias(module)}:{path}".encode()
    return None


def _is_nameless(function: FunctionType) -> bool:
    """Whether a function surely has no name: most lambdas, and functions defined in others."""
    module = function.__module__
    if "<" not in function.__qualname__ or type(module) is not str or module.startswith("torch."):
        return False
    # The program may have assigned it to a variable of its module.
    return getattr(sys.modules.get(module), function.__name__, None) is not function


def _candidates(function: object) -> Iterator[tuple[str, str]]:
    """Yields the modules and paths where ``function`` may be found, the likely ones first."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        yield "torch", f"ops.{function}"
        return
    if isinstance(function, torch.jit.ScriptFunction):
        yield from _script_candidates(function)
        return
    if isinstance(function, CustomOpDef):  # It replaces the function that it was made of.
        function = function._init_fn
    name = getattr(function, "__name__", None)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        # A class method is named by the class it was accessed on, which may have inherited it.
        yield owner.__module__, f"{owner.__qualname__}.{name}"
    elif isinstance(owner, ModuleType):
        yield owner.__name__, str(name)
    home = getattr(function, "__objclass__", None)  # of methods written in C, as Tensor.add
    module = home.__module__ if isinstance(home, type) else getattr(function, "__module__", None)
    if isinstance(module, str):
        for path in (getattr(function, "__qualname__", None), name):
            if isinstance(path, str):
                yield module, path
        # Functions wrapped by torch._dynamo, such as torch.manual_seed, exist only as torch.NAME.
        if module.startswith("torch.") and isinstance(name, str):
            yield "torch", name


def _script_candidates(function: Any) -> Iterator[tuple[str, str]]:
    qualified = str(function.qualified_name).removeprefix("__torch__.")
    module, _, name = qualified.rpartition(".")
    original = getattr(function, "_torchdynamo_inline", None)
    for home in (module or "__main__", getattr(original, "__module__", None)):
        if isinstance(home, str) and home in sys.modules:
            yield home, name
            # A module may keep it under another name: fast = torch.jit.script(slow).
            for attribute, value in list(vars(sys.modules[home]).items()):
                if value is function:
                    yield home, attribute


def _is_there(module: str, path: str, function: object) -> bool:
    found: object = sys.modules.get(module)
    if found is None:
        return False
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):  # RuntimeError: torch.ops has no such operator
        return False
    if found is function:
        return True
    # Each access to a class method makes a new object.
    return isinstance(getattr(function, "__self__", None), type) and found == function
