"""The page on reinforcement learning: its programs run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage

pytest.importorskip("gymnasium")
PAGE = "docs/reinforcement-learning.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_the_same_program_computes_the_same_everywhere_and_learns(
    run: RunPage, guide: Path
) -> None:
    lines = [line.split() for line in run(guide / "balance.py")]
    assert [name for name, *_ in lines] == ["process", "threads", "workers"]
    assert lines[0][1:] == lines[1][1:] == lines[2][1:]
    means = [float(mean) for mean in lines[0][1:]]
    assert len(means) == 8
    assert means[-1] > 1.3 * means[0]


def test_trajectories_come_as_they_are_made(run: RunPage, guide: Path) -> None:
    (line,) = run(guide / "stream.py")
    found = re.fullmatch(r"staleness ([\d ]+) refused \d+", line)
    assert found is not None
    assert max(map(int, found[1].split())) <= 6


def test_the_others_go_on(run: RunPage, guide: Path) -> None:
    assert run(guide / "failures.py") == [
        "left out: worker1",
        "2 trajectories",
        "3 trajectories",
        "same version: True",
    ]
