"""Programs in the documentation pages run unchanged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inside import RunPage

ROOT = Path(__file__).parents[2]
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def programs_of(page: str) -> list[str]:
    return [block for block in blocks_of(page) if "__main__" in block]


def run_apart(program: Path) -> list[str]:
    """Runs a program in an interpreter of its own, in its folder; returns the lines it prints."""
    process = subprocess.Popen(
        [sys.executable, program.name],
        cwd=program.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    return out.splitlines()


@pytest.mark.parametrize("number", [0, 1])
def test_what_the_programs_of_the_readme_learn_shows(
    run: RunPage, number: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(programs_of("README.md")[number])
    lines = run_apart(program) if number == 0 else run(program)
    errors = [float(line.split()[-1]) for line in lines]
    assert len(errors) == 4
    assert errors[-1] < 0.2 * errors[0]


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A folder with the programs of the guide, named by their first lines."""
    for block in programs_of("docs/meta-learning.md"):
        name = block.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(block)
    return tmp_path


def test_the_programs_of_the_guide_compute_the_same(run: RunPage, guide: Path) -> None:
    names = sorted(each.name for each in guide.iterdir())
    assert names == ["maml.py", "nested.py", "on_workers.py"]
    expected = [figure_of(line) for line in run(guide / "maml.py")]
    assert len(expected) == 5
    for name in ("on_workers.py", "nested.py"):
        found = [figure_of(line) for line in run(guide / name)]
        # The tolerance is that of the printed digits.
        assert found == pytest.approx(expected, abs=2e-4), name


def figure_of(line: str) -> float:
    return float(line.split()[-1])
