"""Has PyTorch's compiler leave Weft's functions as they are.

``torch.compile`` looks into all functions that a compiled function calls. A call of another worker
has no graph, and the compiler stumbles over its implementation. So Weft's files are put on the
compiler's list of files to skip: a compiled function is interrupted for a call, as for ``print``.
The compiler takes more than a second to import, so Weft does not import it, but waits for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

_RULES = "torch._dynamo.trace_rules"
"""The module of the compiler that has the list."""


def hide_from_compiler() -> None:
    """Puts Weft on the compiler's list, at once or as soon as the list is there."""
    if _RULES in sys.modules:
        _add_to(import_module(_RULES))  # Waits if another thread is importing it.
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Waits for the import of the list."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec for the list, and extends the list after its import."""
        if fullname != _RULES:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module  # The module keeps its loader.
                execute(module)
                _add_to(module)

            loader.exec_module = exec_module
        return spec


_finder: Any = _Finder()
_has_added = False


def _add_to(rules: Any) -> None:
    global _has_added
    if not _has_added:
        _has_added = True
        rules.add(__name__.partition(".")[0])
