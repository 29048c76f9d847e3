"""The example of samplers and a learner as a program: it learns, and nobody stops for weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "samplers" / "train.py"
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def test_it_learns_from_texts_of_known_versions(tmp_path: Path) -> None:
    arguments = ["--steps", "40", "--pause", "0.01", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 11
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found["rewards"]) == len(found["ages"]) == 40
    assert found["rewards"][0] < 0.2
    assert found["rewards"][-1] > 0.6
    assert 0 <= min(found["ages"]) <= max(found["ages"]) <= 20
    assert found["batches"].keys() == {"worker0", "worker1"}
    assert found["published"]["versions"] == 41
    assert found["published"]["wholes"] == 0, "versions are in shared memory"
    # Pointers are swapped; a tenth of a second for a machine that is busy with other things.
    assert 0 < found["longest_update_s"] < max(found["median_batch_s"], 0.1)
