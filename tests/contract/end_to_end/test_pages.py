"""Programs in the documentation pages run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S, run_apart
from tests.inside import RunPage
from tests.pages import figure_of, python_of

PAGE = "docs/meta-learning.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.mark.parametrize("number", [0, 1])
def test_what_the_programs_of_the_readme_learn_shows(
    run: RunPage, number: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text([block for block in python_of("README.md") if "__main__" in block][number])
    lines = run(program) if number else run_apart(program.name, folder=tmp_path).splitlines()
    errors = [figure_of(line) for line in lines]
    assert len(errors) == 4
    assert errors[-1] < 0.2 * errors[0]


def test_the_programs_of_the_guide_compute_the_same(run: RunPage, guide: Path) -> None:
    names = sorted(each.name for each in guide.iterdir())
    assert names == ["maml.py", "nested.py", "on_workers.py", "reptile.py"]
    expected = [figure_of(line) for line in run(guide / "maml.py")]
    assert len(expected) == 5
    for name in ("on_workers.py", "nested.py"):
        found = [figure_of(line) for line in run(guide / name)]
        # The tolerance is that of the printed digits.
        assert found == pytest.approx(expected, abs=2e-4), name
    alone, on_workers = (figure_of(line) for line in run(guide / "reptile.py"))
    assert on_workers == pytest.approx(alone, abs=2e-4)
