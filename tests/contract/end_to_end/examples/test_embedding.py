"""The embedding example as a program: its figures, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.inside import RunInside

EXAMPLE = Path(__file__).parents[4] / "examples" / "embedding" / "train.py"
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def run(inside: RunInside, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the program; returns its figures and its output."""
    done = inside(EXAMPLE, *arguments, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "figures.json").read_text()), done.stdout


def test_it_learns_and_writes_its_figures(inside: RunInside, tmp_path: Path) -> None:
    arguments = "--steps 100 --batch 512 --staleness 1 --servers 1".split()
    found, text = run(inside, tmp_path, *arguments)
    assert len(found["losses"]) == 100
    quality = {name: each["auc"] for name, each in found["quality"].items()}
    assert quality["click rates"] + 0.02 < quality["model"] < quality["best possible"]
    assert found["places"]["hour"] == "Copies"
    shares = found["unique_share"]
    assert shares.keys() == {"user", "item", "word"}
    sent = found["bytes_per_step"]
    for name, share in shares.items():
        assert 0 < share < 1
        assert sum(sent[name].values()) < 0.1 * found["bytes_per_step_of_copies"][name]
    # Of a user: number and row of 16 values, for 2 x 512 ids, each once.
    assert sent["user"]["pushed"] == pytest.approx(2 * 512 * shares["user"] * (4 + 4 * 16))
    # Weights and biases of two layers, all-reduced by two trainers
    assert sent["network"] == {"all-reduce": 2 * 4 * (96 * 64 + 64 + 64 + 1)}
    assert max(map(int, found["staleness"])) <= 1
    assert sum(found["staleness"].values()) == 2 * 100
    assert set(found["cache_hits"].values()) == {0}
    assert len(found["trainers"]) == 2
    for trainer in found["trainers"]:
        assert trainer.keys() == shares.keys()
        for each in trainer.values():
            assert sum(each["staleness"].values()) == 100
            assert max(map(int, each["staleness"])) <= 1
    pushed = [trainer["user"]["pushed_bytes_per_step"] for trainer in found["trainers"]]
    assert sum(pushed) == pytest.approx(sent["user"]["pushed"])
    assert found["rows_per_s"] > 0
    assert "100 steps of 2 x 512 impressions" in text
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_a_cache_saves_pulls_within_the_bound(inside: RunInside, tmp_path: Path) -> None:
    found, text = run(inside, tmp_path, *"--steps 20 --batch 256 --staleness 4 --cache 0.2".split())
    hits = found["cache_hits"]
    assert hits.keys() == {"user", "item", "word"}
    assert all(0 < share < 1 for share in hits.values())
    shares, sent = found["unique_share"], found["bytes_per_step"]
    needed = 2 * 256 * shares["user"]
    assert sent["user"]["pulled"] == pytest.approx(needed * (1 - hits["user"]) * (4 + 4 * 16))
    assert max(map(int, found["staleness"])) <= 4
    assert "rows that the cache had: user" in text


@pytest.mark.thorough
def test_ctrl_c_ends_it_at_once_with_all_its_workers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stderr is not None
        assert any("step" in line for line in process.stderr)  # of the log: the training goes on
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert out.splitlines()[-1].startswith("stopped after ")
    assert "stopped by KeyboardInterrupt" in err
    assert not (tmp_path / "figures.json").exists()


def test_a_folder_that_cannot_be_written_to_is_told(inside: RunInside, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = inside(EXAMPLE, "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
