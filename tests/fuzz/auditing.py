"""Audit hooks of the interpreter that do nothing but while a block watches.

A hook cannot be removed. If it is a function in Python, other threads may run whenever it is
called, also between functions in C that are one step for other threads otherwise. So while nothing
watches, the interpreter calls a function in C.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Watch = Callable[[str, tuple[object, ...]], None]
"""Takes the name and the arguments of an event; may raise an error, which stops the action."""


def add_hook(watch: Watch) -> Callable[[], AbstractContextManager[None]]:
    """Adds an audit hook; returns the context manager in whose block it calls ``watch``."""

    class Hook:
        __call__: Callable[..., object] = operator.is_

    @contextlib.contextmanager
    def watching() -> Iterator[None]:
        Hook.__call__ = staticmethod(watch)
        try:
            yield
        finally:
            Hook.__call__ = operator.is_

    sys.addaudithook(Hook())
    return watching
