"""The reinforcement learning example as a program: it learns, and writes its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.inside import RunInside

pytest.importorskip("gymnasium")
FOLDER = Path(__file__).parents[4] / "examples" / "reinforcement_learning"
LIMIT_S = 240.0

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 10)


def run(inside: RunInside, folder: Path, arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the program; returns its figures and its output."""
    done = inside(FOLDER / "train.py", *arguments.split(), "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "figures.json").read_text()), done.stdout


def test_it_learns_the_same_in_one_process_and_over_workers(
    inside: RunInside, tmp_path: Path
) -> None:
    options = "a2c --steps 60000 --until-solved --where "
    found = [run(inside, tmp_path, options + where)[0] for where in ("workers", "process")]
    assert [each["solved_after_steps"] for each in found] == [found[0]["solved_after_steps"]] * 2
    assert 0 < found[0]["solved_after_steps"] <= 60_000
    returns = [[episode[2] for episode in each["episodes"]] for each in found]
    assert returns[0] == returns[1]
    assert found[0]["steps_per_forward"] == pytest.approx(8, rel=0.2)
    assert set(found[0]["returns_by_observer"]) == {"worker0", "worker1"}
    assert found[0]["staleness"] == {"0": found[0]["policy_version"] * 2}
    assert (tmp_path / "returns.png").stat().st_size > 10_000


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
def test_further_seeds_reach_the_mean_return_too(
    inside: RunInside, tmp_path: Path, seed: int
) -> None:
    options = "a2c --steps 60000 --until-solved --where process --observers 1 --environments 8"
    found, _ = run(inside, tmp_path, f"{options} --seed {seed}")
    assert 0 < found["solved_after_steps"] <= 60_000
    assert found["mean_return"] >= 195
    assert found["steps"] == found["solved_after_steps"]


@pytest.mark.thorough
def test_observers_that_go_on_meanwhile_and_a_replay_buffer(
    inside: RunInside, tmp_path: Path
) -> None:
    found, text = run(inside, tmp_path, "dqn --stream --steps 3000")
    assert found["steps"] >= 3000
    assert found["steps_per_s"] > 0
    assert "195 was not reached" in text
    found, _ = run(inside, tmp_path, "a2c --stream --steps 3000 --where threads --seed 2")
    assert max(map(int, found["staleness"])) >= 1


def test_a_folder_that_cannot_be_written_to_is_told(inside: RunInside, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = inside(FOLDER / "train.py", "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


COMPAT = ["-m", "torchweft.compat"]


@pytest.mark.parametrize(
    ("way", "program", "forwards"),
    [
        pytest.param("one", COMPAT, 900, marks=pytest.mark.thorough),
        ("batched", COMPAT, 300),
        pytest.param("batched", [], 300, marks=pytest.mark.thorough),
    ],
    ids=["one", "batched", "on torch"],
)
def test_the_programs_of_the_tutorials(way: str, program: list[str], forwards: int) -> None:
    done = subprocess.run(
        [sys.executable, *program, str(FOLDER / "tutorial.py"), way, "--episodes", "3"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    library = "torchweft.compat.rpc" if program else "torch.distributed.rpc"
    assert lines[-1].endswith(f" environment steps/s on {library}, {forwards} forward passes")
