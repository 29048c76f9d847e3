"""The example of samplers and a learner as a program: it learns, and nobody stops for weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inside import RunInside

EXAMPLE = Path(__file__).parents[4] / "examples" / "samplers" / "train.py"
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def test_it_learns_from_texts_of_known_versions(inside: RunInside, tmp_path: Path) -> None:
    arguments = ["--steps", "40", "--pause", "0.01", "--out", str(tmp_path)]
    done = inside(EXAMPLE, *arguments)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found["rewards"]) == len(found["ages"]) == 40
    assert found["rewards"][0] < 0.2
    assert found["rewards"][-1] > 0.6
    assert 0 <= min(found["ages"]) <= max(found["ages"]) <= 20
    assert found["lost"] == []
    assert found["batches"].keys() == {"worker0", "worker1"}
    assert found["published"]["versions"] == 41
    assert found["published"]["wholes"] == 0, "versions are in shared memory"
    # Pointers are swapped; half a second is for a machine that is busy with other things.
    assert 0 < found["longest_update_s"] < max(found["median_batch_s"], 0.5)


def test_a_sampler_that_is_killed_is_left_out(tmp_path: Path) -> None:
    arguments = ["--steps", "60", "--pause", "0.02", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        found = re.search(r"worker1 \(process (\d+)\)", line)
        assert found is not None, line
        assert program.stdout.readline().startswith("step 6: ")
        os.kill(int(found[1]), signal.SIGKILL)
        text, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors
    assert "step 60: " in text
    assert "worker1 is left out: " in errors
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["lost"] == ["worker1"]
    assert len(figures["rewards"]) == sum(figures["batches"].values()) == 60
