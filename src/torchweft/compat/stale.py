"""Finds modules of the program that took names from PyTorch's modules too early."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

OWN = ("torch", "torchweft")
"""Packages whose modules do not belong to the program, and are not searched."""

TESTS = "torch.testing."
"""Prefix of modules in ``OWN`` that count as programs: PyTorch's tests of RPC are there."""

GENERATED = "_remote_module_"
"""Prefix of the names of the modules that PyTorch generates for its remote modules."""

EXTENSIONS = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
"""Extension modules that define many names of the replaced modules."""

MOST_NAMED = 8
"""The most modules that a message names."""


def describe_holders(replaced: Iterable[ModuleType]) -> str:
    """Says which modules of the program hold a replaced module, or an object that it defines.

    Makes one pass over the globals of all modules except the standard library's and PyTorch's:
    about a millisecond. Names held in other places, in a class or a closure, are not found.

    Returns:
        For instance ``"__main__ (rpc), trainer (RRef, rpc_sync)"``; empty if there are none.
    """
    stock = {id(thing) for module in replaced for thing in _defined_by(module)}
    found = [
        f"{name} ({', '.join(held)})"
        for name, content in _program_modules()
        if (held := sorted(key for key, value in content.items() if id(value) in stock))
    ]
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _defined_by(module: ModuleType) -> Iterator[Any]:
    yield module
    homes = (module.__name__, *EXTENSIONS)
    for value in vars(module).values():
        # An object that the module merely imports, such as `threading`, does not count: any module
        # may hold it.
        if callable(value) and getattr(value, "__module__", None) in homes:
            yield value


def _program_modules() -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen = set()
    for name, module in list(sys.modules.items()):
        if id(module) in seen:  # multiprocessing gives __main__ a second name
            continue
        seen.add(id(module))
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names and name != "__main__":
            continue
        if (package in OWN and not name.startswith(TESTS)) or name.startswith(GENERATED):
            continue
        # Check the type itself: cffi libraries claim to be modules, but have no dictionary.
        if issubclass(type(module), ModuleType):
            # Not by attribute access, which would load a lazily imported module.
            yield name, dict(object.__getattribute__(module, "__dict__"))
