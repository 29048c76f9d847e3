"""Runs programs inside this process, as main programs, with workers from a warm process.

A program that is started as a user starts it pays for two imports of PyTorch: its own, and that of
the process from which its workers are forked. Most tests of whole programs are about neither, so
they run the program here. Those that are about starting and ending start an interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import torchweft
from tests.pages import write_programs
from torchweft.launch import Nursery, cluster

FIRST_SEED = torch.Generator().initial_seed()
"""The seed of PyTorch in a process that sets none."""


class Done(NamedTuple):
    """How a program ended, as ``subprocess.run`` describes it.

    Attributes:
        returncode: Its exit status.
        stdout: Its output.
        stderr: Its messages, and the traceback of an error that ended it.
    """

    returncode: int
    stdout: str
    stderr: str


RunInside = Callable[..., Done]
"""``run_inside`` with its nursery: takes the program, its arguments, and ``folder``."""
RunPage = Callable[[Path], list[str]]
"""Runs a program without arguments; returns the lines that it prints."""


def run_inside(
    nursery: Nursery, program: Path, *arguments: str, folder: Path | None = None
) -> Done:
    """Runs a script to its end, as ``python program arguments`` would.

    Args:
        nursery: The process from which the program's clusters are forked.
        program: The script.
        arguments: Its arguments.
        folder: The current folder meanwhile; by default that of this process.
    """
    out, err = io.StringIO(), io.StringIO()
    with _surroundings(nursery, program, folder), _redirected(out, err):
        # Messages show the path, as a user gives it.
        path = program.name if folder == program.parent else str(program)
        sys.argv[:] = [path, *arguments]
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = _status_of(end.code)
        except Exception:
            traceback.print_exc()
            status = 1
    return Done(status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _redirected(out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


@contextlib.contextmanager
def _surroundings(nursery: Nursery, program: Path, folder: Path | None) -> Iterator[None]:
    """Sets what a fresh interpreter has, and puts it back as it was afterwards."""
    made = functools.partial(cluster, nursery=nursery)
    kept = (sys.argv[:], sys.path[:], dict(os.environ), torch.get_num_threads())
    with (
        pytest.MonkeyPatch.context() as patch,
        own_modules(program.parent),
        _own_logging(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        torch.manual_seed(FIRST_SEED)
        patch.setattr(torchweft, "cluster", made, raising=False)
        sys.path.insert(0, str(program.parent))
        if folder is not None:
            patch.chdir(folder)
        try:
            yield
        finally:
            sys.argv[:], sys.path[:] = kept[0], kept[1]
            os.environ.clear()
            os.environ.update(kept[2])
            torch.set_num_threads(kept[3])


@contextlib.contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Hides modules with the names of those beside a program; forgets the program's own."""
    names = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }

    def take() -> dict[str, object]:
        found = [name for name in sys.modules if name.partition(".")[0] in names]
        return {name: sys.modules.pop(name) for name in found}

    hidden = take()
    try:
        yield
    finally:
        take()
        sys.modules.update(hidden)  # type: ignore[arg-type]


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Has a program find no handlers, as a fresh interpreter does; removes those that it adds."""
    root = logging.getLogger()
    kept = (root.handlers[:], root.level)
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:], root.level = kept


@pytest.fixture
def inside(nursery: Nursery) -> RunInside:
    """Runs a program, with its arguments, in this process."""
    return functools.partial(run_inside, nursery)


@pytest.fixture
def run(inside: RunInside) -> RunPage:
    """Runs a program of a page in its folder, in this process; returns the lines that it prints."""

    def lines_of(program: Path) -> list[str]:
        done = inside(program, folder=program.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return lines_of


@pytest.fixture
def guide(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs of the page that the test's module names as ``PAGE``."""
    write_programs(request.module.PAGE, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path
