"""Training runs with faults; ``python -m tests.faults`` runs as many as are asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.plan import CYCLE, draw

RUNS = (4, 14, 15, 28, 37, 39, 42, 45, 50, 52, 60, 73, 74, 76, 78, 83, 87, 88, 96, 103, 129)
LIMIT_S = 110.0
_LINE = re.compile(r" *(\d+) (ok|WRONG|skipped)\b.*")


def test_every_kind_of_fault_is_among_the_runs() -> None:
    kinds = {fault.kind for number in RUNS for fault in draw(number).faults}
    assert kinds == {kind for kind, _ in CYCLE}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What is said of each run."""
    kept = tmp_path_factory.mktemp("logs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--keep", kept, "--only", *map(str, RUNS)],
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
    line = lines[number]
    if "skipped" in line:
        pytest.skip(line)
    assert " ok " in line, line
    assert "did not strike" not in line
