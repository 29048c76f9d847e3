"""Versions of programs: whether two processes have loaded the same code."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

_PLAIN = (int, float, str, bytes, bool, tuple, type(None))


def program_of(function: str | Callable[..., Any]) -> str:
    """Returns a digest of the module of a function, as this process has loaded it.

    It changes with the code of functions and methods of the module, and with its plain constants;
    it does not with comments. A function of the main program travels by value, so it has the same
    version everywhere; a name is its own version.
    """
    if not callable(function):
        return function
    name = getattr(function, "__module__", None) or ""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return "by value"
    digest = hashlib.sha256()
    for part in _parts(vars(module), name):
        digest.update(part.encode())
    return digest.hexdigest()[:12]


def _parts(namespace: Any, module: str) -> Iterator[str]:
    for name in sorted(namespace):
        value = namespace[name]
        value = getattr(value, "__func__", value)
        if inspect.isfunction(value) and value.__module__ == module:
            yield name
            yield from _code(value.__code__)
        elif inspect.isclass(value) and value.__module__ == module:
            yield name
            yield from _parts(vars(value), module)
        elif isinstance(value, _PLAIN) and not name.startswith("__"):
            yield f"{name}={value!r}"


def _code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)
