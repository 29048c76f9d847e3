"""The page on watching a group: its program runs unchanged, and leaves a whole trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.test_pages import LIMIT_S, programs_of, run
from tests.trace_reader import read_trace

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def test_the_trace_shows_a_step(tmp_path: Path) -> None:
    (block,) = programs_of("docs/observing.md")
    (tmp_path / "traced.py").write_text(block)
    head, *lines = run(tmp_path / "traced.py")
    assert head.startswith("context 1: 3 workers, 11 messages")
    assert sum("backward  on worker" in line for line in lines) == 2
    found = read_trace(tmp_path / "step.json")
    assert {found.worker_of(each) for each in found.slices} == {"driver", "worker0", "worker1"}
    layers = [each for each in found.of("run") if each["name"] == "__main__.layer"]
    assert len(layers) == 2
    steps = {found.worker_of(each) for each in found.of("optimizer")}
    assert steps == {"driver", "worker0", "worker1"}
