"""The meta-learning example as a program: workers compute the same as one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.inside import RunInside

EXAMPLE = Path(__file__).parents[4] / "examples" / "meta_learning"
QUICK = ("--iterations", "4", "--tasks", "5", "--held-out", "30", "--double")
LIMIT_S = 120.0

# A test runs the program up to twice, with its imports.
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 10)


def run(inside: RunInside, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the program; returns its figures and its output."""
    done = inside(EXAMPLE / "train.py", *arguments, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "figures.json").read_text()), done.stdout


@pytest.mark.parametrize(
    "order",
    [(), pytest.param(("--first-order",), marks=pytest.mark.thorough)],
    ids=["second", "first"],
)
def test_workers_learn_what_one_process_learns(
    inside: RunInside, tmp_path: Path, order: tuple[str, ...]
) -> None:
    alone, _ = run(inside, tmp_path / "alone", "sinusoid", *QUICK, *order, "--workers", "0")
    shared, text = run(inside, tmp_path / "shared", "sinusoid", *QUICK, *order)
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    for tested, expected in zip(shared["tests"], alone["tests"], strict=True):
        assert tested == pytest.approx(expected, rel=1e-12)
    assert "4 meta-steps in" in text
    assert (tmp_path / "shared" / "adaptation.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_each_task_may_be_a_part_of_its_own(inside: RunInside, tmp_path: Path) -> None:
    alone, _ = run(inside, tmp_path / "alone", "sinusoid", *QUICK, "--workers", "0")
    shared, text = run(inside, tmp_path / "shared", "sinusoid", *QUICK, "--one-by-one")
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert "mean squared error of held-out tasks" in text


def test_a_folder_that_cannot_be_written_to_is_told(inside: RunInside, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = inside(EXAMPLE / "train.py", "sinusoid", "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
