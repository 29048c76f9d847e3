"""The functions and classes of Weft that messages may name, as one list."""

from __future__ import annotations

from importlib import import_module

from torchweft.engine.codec.registry import Mark


def names_of(*marks: Mark) -> frozenset[str]:
    """Returns the names with one of the marks, from all modules that may use that mark."""
    return frozenset(
        f"{module}:{path}"
        for mark in marks
        for module in mark.modules
        for path in vars(import_module(module))
        if mark.has(f"{module}:{path}")
    )
