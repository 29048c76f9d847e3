"""Training runs with faults; ``python -m tests.faults`` makes any number of runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.map_plan import SHAPES, WAYS, draw_maps
from tests.faults.plan import CYCLE, draw
from tests.thorough import THOROUGH

CHECKED = (4, 14, 15, 39, 42, 50, 52, 73, 83, 87, 96, 129)
"""Runs with every kind of fault; the others kill at further points."""
MAPS_CHECKED = (2, 6, 12, 33, 117)
RUNS = (*CHECKED, *((28, 37, 45, 60, 74, 76, 78, 88, 103) if THOROUGH else ()))
FURTHER_MAPS = (9, 13, 19, 21, 24, 42, 52, 89, 90, 143, 191, 258)
MAP_RUNS = (*MAPS_CHECKED, *(FURTHER_MAPS if THOROUGH else ()))
LIMIT_S = 230.0
_LINE = re.compile(r" *(\d+) (ok|WRONG|skipped)[ :].*")


def test_every_kind_of_fault_is_among_the_runs() -> None:
    kinds = {fault.kind for number in CHECKED for fault in draw(number).faults}
    assert kinds == {kind for kind, _ in CYCLE}


def test_every_kind_of_training_by_maps_is_among_the_runs() -> None:
    programs = [draw_maps(number).program for number in MAPS_CHECKED]
    assert {program.shape for program in programs if program} == set(SHAPES)
    assert {program.way for program in programs if program} == set(WAYS)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The report of each run."""
    return _run(tmp_path_factory.mktemp("logs"), RUNS)


@pytest.fixture(scope="module")
def map_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The report of each run of training by maps."""
    return _run(tmp_path_factory.mktemp("logs"), MAP_RUNS, "--maps")


def _run(kept: Path, numbers: Sequence[int], *options: str) -> dict[int, str]:
    named = ["--only", *map(str, numbers)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--keep", kept, *options, *named],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    print(done.stdout, done.stderr)
    found: dict[int, str] = {}
    number = None
    for line in done.stdout.splitlines():
        heading = _LINE.fullmatch(line)
        if heading is not None:
            number = int(heading[1])
            found[number] = line
        elif number is not None and line.startswith("  "):
            found[number] += f"\n{line}"
    return found


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("number", RUNS)
def test_a_run_ends_as_it_must(lines: dict[int, str], number: int) -> None:
    _check(lines[number])


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("number", MAP_RUNS)
def test_training_by_maps_goes_on(map_lines: dict[int, str], number: int) -> None:
    _check(map_lines[number])


def _check(line: str) -> None:
    if "skipped" in line:
        pytest.skip(line)
    assert " ok " in line, line
    assert "did not strike" not in line
