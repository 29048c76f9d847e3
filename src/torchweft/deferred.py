"""Names of a package whose modules are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def import_name(package: str, name: str, module: str) -> Any:
    """Returns a name of a module, and puts it into a package, whose ``__getattr__`` calls this.

    Args:
        package: The name of the package, which then has the name without its ``__getattr__``.
        name: The name. No module of the package may have it: its import would put the module there.
        module: The module that has the name; the module itself if it is ``package.name``.
    """
    value: Any = importlib.import_module(module)
    if module != f"{package}.{name}":
        value = getattr(value, name)
    setattr(sys.modules[package], name, value)
    return value
