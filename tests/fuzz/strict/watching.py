"""Watches a strict worker while it handles a message, and stops forbidden actions."""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Iterator
from typing import ForwardRef

from tests.fuzz.auditing import add_hook
from tests.fuzz.strict import program
from torchweft.engine.codec import tensors

_DEEDS = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.")
_DEEDS += ("shutil.", "marshal.", "pickle.", "sys.", "builtins.", "tempfile.", "mmap.", "code.")
_DEEDS += ("cpython.", "urllib.", "ftplib.", "glob.", "fcntl.", "webbrowser.", "sqlite3.")
_HARMLESS = ("sys._getframe", "sys.excepthook", "sys.unraisablehook", "builtins.id", "sys._current")

_LOOKS_FOR_GPUS = (
    ("ctypes.dlopen", ("libnvidia-ml.so.1",)),
    ("os.putenv", (b"CUDA_MODULE_LOADING", b"LAZY")),
)
"""A torch with CUDA does this where a message names a GPU and there is none: it looks for the
library again and again, and older releases set a default for how CUDA loads code."""

_deeds: list[str] = []

_PARSERS = (ast.parse.__code__, ForwardRef.__init__.__code__)
"""Functions that compile source text without running it: for tracebacks, and for annotations."""


def _is_of_views() -> bool:
    """Whether the bytes of tensors that overlap are read, for a message."""
    callers = (sys._getframe(depth).f_code for depth in (2, 3))
    return tensors._Union.memory.__code__ in callers


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if not event.startswith(_DEEDS) or event.startswith(_HARMLESS):
        return
    if (event, arguments) in _LOOKS_FOR_GPUS or (event == "ctypes.string_at" and _is_of_views()):
        return
    # For a text that is not valid, Python 3.13 looks for a source file named "<unknown>".
    is_parsing = event == "compile" or (event == "open" and arguments[0] == "<unknown>")
    if not is_parsing or sys._getframe(1).f_code not in _PARSERS:
        _deeds.append(f"{event}{arguments!r}"[:300])
        raise PermissionError(event)


_watching = add_hook(_watch)


def read_sources() -> None:
    """Reads the sources that tracebacks show, of all modules, so that none is opened later."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py"):
            linecache.getlines(path)


@contextlib.contextmanager
def nothing_else_done() -> Iterator[None]:
    """Asserts that a block does nothing beyond what is registered."""
    try:
        with _watching():
            yield
    finally:
        done, _deeds[:] = list(_deeds), []
        sung, program.sung[:] = list(program.sung), []
    assert not done, f"a message had this done: {done}"
    assert not sung, f"a message had this run: {sung}"
