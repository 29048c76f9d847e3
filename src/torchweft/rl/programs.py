"""Versions of programs: whether two processes have loaded the same code."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from types import CodeType
from typing import Any

from torchweft.rl.following import FollowingPolicy

_PLAIN = (int, float, str, bytes, bool, type(None))


def program_of(make: str | Callable[..., Any], asked: Any = None) -> str:
    """Returns the version of the code that makes environments, as this process has loaded it.

    That of a function is a digest of its module. It changes with the code of functions and methods
    of the module, and with its plain constants; it does not with comments. Of a partial function, a
    method, an object, or a function that wraps another, all these modules count. A function of the
    main program travels by value, so it has the same version everywhere. A name has the version of
    gymnasium.

    Args:
        make: The function, or the name of environments.
        asked: What observers ask. The function that makes a ``FollowingPolicy`` counts as well.

    Returns:
        The version; empty for a name if this process has no gymnasium.
    """
    found = _version_of_name(make) if isinstance(make, str) else _digest(make)
    if found and isinstance(asked, FollowingPolicy):
        found += f", policy {_digest(asked.make)}"
    return found


def _version_of_name(name: str) -> str:
    try:
        return f"{name} of gymnasium {metadata.version('gymnasium')}"
    except metadata.PackageNotFoundError:
        return ""


def _digest(function: Callable[..., Any]) -> str:
    names = sorted({name for name in _modules(function, set()) if name in sys.modules})
    names = [name for name in names if name not in ("__main__", "builtins")]
    if not names:
        return "by value"
    digest = hashlib.sha256()
    for name in names:
        for part in _parts(vars(sys.modules[name]), name, set()):
            digest.update(part.encode())
    return digest.hexdigest()[:12]


def _modules(made: Any, seen: set[int]) -> Iterator[str]:
    """Yields the modules of a callable, and of the callables in it."""
    if id(made) in seen or not callable(made):
        return
    seen.add(id(made))
    within: tuple[Any, ...]
    if isinstance(made, functools.partial):
        within = (made.func, *made.args, *made.keywords.values())
    elif inspect.ismethod(made):
        owner = made.__self__
        within = (made.__func__, owner if inspect.isclass(owner) else type(owner))
    elif inspect.isclass(made) or inspect.isfunction(made):
        within = ()
        if "<" not in made.__qualname__:  # Others travel by value.
            yield made.__module__
        if inspect.isfunction(made):
            if hasattr(made, "__wrapped__"):  # It has the name and the module of the wrapped one.
                yield made.__globals__.get("__name__", "")
            within = (getattr(made, "__wrapped__", None), *_closure(made))
    else:
        within = (type(made), getattr(made, "__wrapped__", None))
    for each in within:
        yield from _modules(each, seen)


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # It is empty so far.


def _parts(namespace: Any, module: str, seen: set[type]) -> Iterator[str]:
    for name in sorted(namespace):
        value = namespace[name]
        value = getattr(value, "__func__", value)
        if inspect.isfunction(value) and value.__module__ == module:
            yield name
            yield from _code(value.__code__)
        elif inspect.isclass(value) and value.__module__ == module:
            yield name
            if value not in seen:
                seen.add(value)
                yield from _parts(vars(value), module, seen)
        elif _is_plain(value) and not name.startswith("__"):
            yield f"{name}={value!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


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
