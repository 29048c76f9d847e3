"""Finds modules of the program that took names from PyTorch's modules too early."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

OWN = ("torch", "torchweft")
"""Packages whose modules are no program's, so that they are not looked at."""

TESTS = "torch.testing."
"""These are programs all the same: PyTorch's tests of RPC are in there."""

GENERATED = "_remote_module_"
"""Begin of the names of the modules that PyTorch writes for its remote modules."""

EXTENSIONS = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
"""Where much of what the replaced modules offer is defined."""

MOST_NAMED = 8
"""A message names no more modules than these."""


def describe_holders(replaced: Iterable[ModuleType]) -> str:
    """Says which modules of the program hold a replaced module, or something that it defines.

    One pass over the globals of all modules but the standard library's and PyTorch's: about a
    millisecond. Names that modules have in other places, in a class or a closure, are not found.

    Returns:
        For instance ``"__main__ (rpc), trainer (RRef, rpc_sync)"``; empty where there is none.
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
        # What a module merely imports, such as `threading`, says nothing about who holds it.
        if callable(value) and getattr(value, "__module__", None) in homes:
            yield value


def _program_modules() -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen = set()
    for name, module in list(sys.modules.items()):
        if id(module) in seen:  # multiprocessing calls __main__ by a second name
            continue
        seen.add(id(module))
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names and name != "__main__":
            continue
        if (package in OWN and not name.startswith(TESTS)) or name.startswith(GENERATED):
            continue
        # By its type: libraries of cffi say that they are modules, and have no dictionary.
        if issubclass(type(module), ModuleType):
            # Not by attribute: that would load a module which waits for its first use.
            yield name, dict(object.__getattribute__(module, "__dict__"))
