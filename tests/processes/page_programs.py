"""Programs of documentation pages: each is run as it is printed, with workers from a warm process.

A program is a block of Python whose first line is a comment with its file's name. A block of
``text`` that follows it, before another block, is what it prints.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import torchweft
from torchweft.launch import Nursery, cluster

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.M | re.S)
_NAME = re.compile(r"# (\w+\.py)\n")
_VARYING = re.compile(
    r"(?<=lost since )\d\d:\d\d:\d\d: [\w (]+\)?"  # Busy machines learn the reason too late.
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|(?<=SIGKILL )\([\w ,]+\)"
    r"|\b\d+(?:\.\d+)? s\b|\b(?:pid|process) \d+|/\S+/(?=\w+\.py)"
)
_OF_WORKER = re.compile(r"\[\w+\] ")
_FLOAT = re.compile(r"\d+\.\d+")
_TOLERANCE = 2e-4
"""That of the printed digits: processors add in different orders."""


class Program(NamedTuple):
    """A program of a page.

    Attributes:
        name: The name of its file.
        source: Its text.
        printed: What the page says that it prints; None if the page does not show it.
    """

    name: str
    source: str
    printed: str | None


def programs_of(page: str) -> list[Program]:
    """Returns the programs of a page, in order."""
    blocks = _BLOCK.findall((ROOT / page).read_text())
    following = [*blocks[1:], ("", "")]
    found = []
    for (language, source), (kind, text) in zip(blocks, following, strict=True):
        named = _NAME.match(source) if language == "python" else None
        if named:
            found.append(Program(named[1], source, text if kind == "text" else None))
    return found


def write_programs(page: str, folder: Path) -> list[Program]:
    """Writes the programs of a page into files of a folder; returns them."""
    programs = programs_of(page)
    for each in programs:
        (folder / each.name).write_text(each.source)
    return programs


@contextlib.contextmanager
def runner_of(
    page: str, folder: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], str]]:
    """Yields a function that runs a program of a page by its name; it returns the output.

    The programs are files of ``folder``, which is the current folder, and may import each other.
    """
    modules = {each.name.removesuffix(".py") for each in write_programs(page, folder)}
    assert not modules.intersection(sys.modules), "a module of a page hides another"
    look = functools.partial(look_in, str(folder))
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        # For commands that a program starts, in its own folder.
        patch.setenv("PYTHONPATH", str(Path(torchweft.__file__).parents[1]))
        made = functools.partial(cluster, nursery=nursery, setup=look)
        patch.setattr(torchweft, "cluster", made, raising=False)
        try:
            yield _run
        finally:
            for module in modules:
                sys.modules.pop(module, None)


def _run(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(name, run_name="__main__")
    return printed.getvalue()


def look_in(folder: str) -> None:
    """Has a worker import the programs of a page; those of pages before are forgotten."""
    sys.path.insert(0, folder)


def assert_alike(found: str, shown: str) -> None:
    """Compares what a program printed with what its page shows.

    Times, folders and numbers of processes differ from run to run. Lines of workers come at their
    own times.
    """
    found, shown = (_in_order(_VARYING.sub("...", each)) for each in (found, shown))
    assert _FLOAT.sub("0.0", found) == _FLOAT.sub("0.0", shown)
    numbers = [[float(text) for text in _FLOAT.findall(each)] for each in (found, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=_TOLERANCE)


def _in_order(text: str) -> str:
    """Returns a text with the lines of workers last, those of each in their order."""

    def worker_of(line: str) -> str:
        found = _OF_WORKER.match(line)
        return found[0] if found else ""

    return "\n".join(sorted(text.splitlines(), key=worker_of))
