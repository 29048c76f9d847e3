"""Runs a program as ``python`` itself would, with the replacement installed."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any

from torchweft.compat.bootstrap import sitecustomize
from torchweft.compat.installing import enable_in_children

PROGRAM = "python -m torchweft.compat"

USAGE_STATUS = 2
"""Python's exit status if it cannot open a script."""

HELP = f"""\
usage: {PROGRAM} SCRIPT [ARGUMENT ...]
       {PROGRAM} -m MODULE [ARGUMENT ...]

Runs a program written for torch.distributed.rpc on Weft: in this process, and in the Python
processes that it starts, torch.distributed.rpc, torch.distributed.autograd,
torch.distributed.optim.DistributedOptimizer and torch.distributed.nn.RemoteModule are Weft's.
Everything else is as with python SCRIPT, or python -m MODULE.

With torchrun, either of
  torchrun --nproc-per-node 2 -m torchweft.compat SCRIPT
  {PROGRAM} -m torch.distributed.run --nproc-per-node 2 SCRIPT
"""

_FILES = (__file__, os.path.join(os.path.dirname(__file__), "__main__.py"))


class _UnusableProgram(Exception):
    """There is no program that could be run; the message is one line for the user."""


def main(arguments: Sequence[str]) -> None:
    """Runs the program that the arguments of ``python -m torchweft.compat`` name, to its end.

    Raises:
        SystemExit: There is no program to run, or the program raises it.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    try:
        run = _prepare(list(arguments))
    except _UnusableProgram as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(USAGE_STATUS)
    enable_in_children()
    sitecustomize.arm()
    try:
        run()
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _without_own_frames(sys.excepthook)
        raise


def _prepare(arguments: list[str]) -> Callable[[], object]:
    """Sets ``sys.argv``, ``sys.path`` and ``__main__`` for the program; returns its start."""
    if not arguments:
        raise _UnusableProgram("which script, or with -m which module? See --help")
    first, *rest = arguments
    if first == "-m":
        if not rest:
            raise _UnusableProgram("-m needs the name of a module; see --help")
        _make_main()
        sys.argv[:] = ["-m", *rest[1:]]
        return lambda: _run_as_main(rest[0])
    if first.startswith("-"):
        raise _UnusableProgram(f"there is no option {first}; see --help")
    is_container = os.path.isdir(first) or zipfile.is_zipfile(first)
    data = b"" if is_container else _read(first)
    sys.argv[:] = arguments
    module = _make_main()
    path = os.path.join(os.getcwd(), first)  # absolute, and otherwise as it was written
    if is_container:
        _set_first_folder(path)
        return lambda: _run_as_main("__main__", False)
    _set_first_folder(os.path.dirname(os.path.realpath(first)))
    return lambda: _run_script(module, path, data)


def _read(path: str) -> bytes:
    try:
        with io.open_code(os.path.abspath(path)) as file:
            return file.read()
    except OSError as error:
        raise _UnusableProgram(f"can't open file {path!r}: {error.strerror}") from None


def _make_main() -> ModuleType:
    """Gives the program its own ``__main__``, under which names are looked up and pickled."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


def _set_first_folder(folder: str) -> None:
    """Replaces the current folder, which ``-m`` put first; ``python -P`` puts no folder there."""
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = folder


def _run_script(module: ModuleType, path: str, data: bytes) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader)
    exec(_compile(data, path), vars(module))


def _compile(data: bytes, path: str) -> CodeType:
    compiled: CodeType | None = pkgutil.read_code(io.BytesIO(data))
    return compile(data, path, "exec", dont_inherit=True) if compiled is None else compiled


def _run_as_main(name: str, changes_argv: bool = True) -> object:
    # Python itself calls this for -m; the public function gives the program no lasting __main__.
    return runpy._run_module_as_main(name, changes_argv)  # type: ignore[attr-defined]


def _without_own_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook for uncaught exceptions that shows only the program's frames."""

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        traceback = _program_part(traceback, isinstance(error, SyntaxError))
        hook(kind, error.with_traceback(traceback), traceback)

    return show


def _program_part(whole: TracebackType | None, may_be_empty: bool) -> TracebackType | None:
    part = whole
    while part is not None and part.tb_frame.f_code.co_filename not in _FILES:
        part = part.tb_next
    while part is not None and part.tb_frame.f_code.co_filename in _FILES:
        part = part.tb_next
    return whole if part is None and not may_be_empty else part
