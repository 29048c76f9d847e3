"""Replaces functions of PyTorch for a whole process, also where they were imported by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def replace(function: Callable[..., Any], replacement: Callable[..., Any], name: str) -> None:
    """Has all modules that know a function by its public name call another one in its place.

    Args:
        function: The function.
        replacement: The other one.
        name: The public name. Code that calls the function by other names is left as it is.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is function:
            names[name] = replacement
