"""Sets a time limit, as many interpreters import torch slowly; runs programs in this process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.inside import RunInside, RunPage, run_inside
from tests.pages import write_programs
from tests.processes.conftest import nursery as nursery
from torchweft.launch import Nursery

LIMIT_S = 240.0
"""Time limit of a test in this folder that does not set its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


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
