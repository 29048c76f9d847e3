"""Programs of documentation pages, which tests run as they are printed.

A program is a block of Python whose first line is a comment with its file's name. A block of
``text`` that follows it, before another block, is what it prints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.M | re.S)
_NAME = re.compile(r"# (\w+\.py)\n")
_VARYING = re.compile(
    r"(?<=lost since )\d\d:\d\d:\d\d: [\w (]+\)?"  # Busy machines learn the reason too late.
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|(?<=SIGKILL )\([\w ,]+\)"
    r"|(?<=step\()\d+(?=\))|(?<=autograd context )\d+"  # Numbers of contexts are random.
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


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def python_of(page: str) -> list[str]:
    """Returns the blocks of Python of a page, programs and others."""
    return [source for language, source in _BLOCK.findall(text_of(page)) if language == "python"]


def programs_of(page: str) -> list[Program]:
    """Returns the programs of a page, in order."""
    blocks = _BLOCK.findall(text_of(page))
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


def figure_of(line: str) -> float:
    """Returns the number at the end of a line."""
    return float(line.split()[-1])


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
