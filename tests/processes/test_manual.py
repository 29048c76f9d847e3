"""The programs of the manual's pages print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.page_programs import Program, assert_alike, programs_of, runner_of
from torchweft.launch import Nursery

PAGES = ["docs/parameter-server.md"]
PROGRAMS = [(page, program) for page in PAGES for program in programs_of(page)]


@pytest.mark.parametrize(
    ("page", "program"), PROGRAMS, ids=[f"{page}-{program.name}" for page, program in PROGRAMS]
)
@pytest.mark.keeps("threads", "descriptors")
def test_a_program_prints_what_its_page_shows(
    page: str,
    program: Program,
    nursery_with_compiler: Nursery,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with runner_of(page, tmp_path, nursery_with_compiler, monkeypatch) as run:
        printed = run(program.name)
    assert program.printed is not None, printed
    assert_alike(printed, program.printed)
