"""The programs of the manual's pages print what the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchweft
from tests.inside import run_inside
from tests.pages import Program, assert_alike, programs_of, text_of, write_programs
from torchweft.launch import Nursery

pytestmark = pytest.mark.timeout(150)  # The first program imports PyTorch's compiler.

PAGES = [
    "docs/index.md",
    "docs/parameter-server.md",
    "docs/model-parallel.md",
    "docs/map-reduce.md",
    "docs/restarting.md",
    "docs/debugging.md",
    "docs/tuning.md",
    "docs/securing.md",
    "docs/api/observe.md",
]
PROGRAMS = [(page, program) for page in PAGES for program in programs_of(page)]
SHOWN = [(page, program) for page, program in PROGRAMS if program.printed is not None]
OTHERS = {"locking.py", "served.py", "train.py"}
"""Modules of other programs, and a program that a launcher starts."""


@pytest.mark.parametrize(
    ("page", "program"), SHOWN, ids=[f"{Path(page).stem}-{each.name}" for page, each in SHOWN]
)
@pytest.mark.keeps("threads", "descriptors")
def test_a_program_prints_what_its_page_shows(
    page: str,
    program: Program,
    nursery: Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # For commands that the program starts, in its own folder.
    monkeypatch.setenv("PYTHONPATH", str(Path(torchweft.__file__).parents[1]))
    write_programs(page, tmp_path)
    done = run_inside(nursery, tmp_path / program.name, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_alike(done.stdout, program.printed or "")


def test_pages_show_what_their_programs_print() -> None:
    without = {program.name for _, program in PROGRAMS if program.printed is None}
    assert without == OTHERS


def test_the_variables_that_pages_name_are_in_the_table() -> None:
    known = variables_of("docs/variables.md")
    for page in (*PAGES, "docs/install.md", "docs/questions.md"):
        assert variables_of(page) <= known, page


def variables_of(page: str) -> set[str]:
    return set(re.findall(r"\bWEFT_[A-Z_]*[A-Z]\b", text_of(page)))


def test_the_extras_that_the_page_names_exist() -> None:
    project = text_of("pyproject.toml")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = re.findall(r"^([\w-]+) = \[", extras, re.M)
    named = re.findall(r"^\| `(\w+)` \|", text_of("docs/install.md"), re.M)
    assert len(named) == 8
    assert set(named) <= set(known)
