"""The examples with embeddings on servers and a layer under DDP, as programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inside import RunInside

EXAMPLES = Path(__file__).parents[4] / "examples" / "hybrid"
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def test_four_processes_train_an_embedding_and_a_layer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py"), "--epochs", "20", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "process group: gloo: CPUs of one host" in done.stdout
    assert "200 steps of 2 trainers" in done.stdout
    losses = json.loads((tmp_path / "figures.json").read_text())["losses"]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]


def test_a_number_of_epochs_that_cannot_work_is_told(inside: RunInside) -> None:
    done = inside(EXAMPLES / "train.py", "--epochs", "0")
    assert done.returncode == 2
    assert "--epochs is 0; it is at least 1" in done.stderr


def test_a_table_over_two_servers_and_a_layer_under_ddp_are_trained(inside: RunInside) -> None:
    done = inside(EXAMPLES / "tables.py", "--steps", "40")
    assert done.returncode == 0, done.stderr
    assert re.search(r"words\.weight .* worker2, worker3 ", done.stdout)
    losses = [float(each) for each in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.5 * losses[0]


def test_a_number_of_steps_that_cannot_work_is_told(inside: RunInside) -> None:
    done = inside(EXAMPLES / "tables.py", "--steps", "0")
    assert done.returncode == 2
    assert "--steps is 0; it is at least 1" in done.stderr
