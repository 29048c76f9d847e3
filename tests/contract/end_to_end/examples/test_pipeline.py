"""The pipeline example as a program: its results, whatever the schedule, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.inside import RunInside

EXAMPLE = Path(__file__).parents[4] / "examples" / "pipeline" / "train.py"
QUICK = "--workers 2 --blocks 4 --epochs 1 --batch 64 --microbatches 4".split()
LIMIT_S = 120.0

# A test runs the program up to twice, with its imports.
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 10)


def run(inside: RunInside, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the program; returns its figures and its output."""
    done = inside(EXAMPLE, *QUICK, *arguments, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "figures.json").read_text()), done.stdout


def test_schedules_learn_the_same(inside: RunInside, tmp_path: Path) -> None:
    found, text = run(inside, tmp_path / "1f1b")
    other, _ = run(inside, tmp_path / "zbv", "--schedule", "zbv", "--checkpoint", "always")
    assert len(found["losses"]) == 22
    assert other["losses"] == pytest.approx(found["losses"], rel=1e-2)
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    every = {"naive", "gpipe", "1f1b", "interleaved", "zbv", "pipedream"}
    assert found["schedules"].keys() == every
    versions = {name: each["versions_held"] for name, each in found["schedules"].items()}
    assert versions == {name: [2, 1] if name == "pipedream" else [1, 1] for name in every}
    assert found["schedules"]["1f1b"]["accuracy"] == found["accuracy"]
    peaks = {name: each["peak_activations"] for name, each in found["schedules"].items()}
    assert peaks["gpipe"] == [4, 4]
    assert peaks["1f1b"] == [2, 1]
    assert peaks["naive"] == [1, 1]
    assert peaks["pipedream"] == [2, 1]
    for each in found["schedules"].values():
        assert 0 < each["idle_share"] < 1
        assert each["steps_per_s"] > 0
    assert "22 steps of 64 images" in text
    assert (tmp_path / "1f1b" / "timelines.png").stat().st_size > 10_000
    assert (tmp_path / "1f1b" / "timeline.svg").read_text().count("Schedule1F1B") >= 2
    assert json.loads((tmp_path / "1f1b" / "timeline.json").read_text())["traceEvents"]


def test_schedules_that_cannot_be_are_left_out_and_blocks_frozen(
    inside: RunInside, tmp_path: Path
) -> None:
    found, text = run(inside, tmp_path, "--microbatches", "2", "--freeze", "2")
    assert found["schedules"].keys() == {"naive", "gpipe", "1f1b", "interleaved", "pipedream"}
    assert "zbv          left out: " in text


@pytest.mark.thorough
def test_a_pipeline_that_does_not_wait_learns_with_replicas(
    inside: RunInside, tmp_path: Path
) -> None:
    arguments = "--schedule pipedream --weights vertical-sync --replicas 2,1 --workers 3".split()
    found, text = run(inside, tmp_path, *arguments)
    assert len(found["losses"]) == 89  # of 16 images each
    assert sum(found["losses"][-10:]) < 0.9 * sum(found["losses"][:10])
    assert found["schedules"].keys() == {"gpipe", "1f1b", "pipedream"}
    trial = found["schedules"]["pipedream"]
    assert trial["versions_held"] == [2, 2, 2]
    assert trial["accuracy"] == found["accuracy"]
    assert "zbv          left out: zbv has no replicas" in text
    assert "SchedulePipeDream" in (tmp_path / "timeline.svg").read_text()


@pytest.mark.thorough
def test_a_pipeline_shrinks_while_layers_freeze(inside: RunInside, tmp_path: Path) -> None:
    found, text = run(inside, tmp_path, *"--workers 4 --blocks 6 --epochs 6 --shrink 0.34".split())
    assert found["frozen"] == [0, 0, 0, 2, 2, 4]
    assert found["stages"] == [4, 4, 4, 4, 4, 2]
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert "stages by epoch: 4 4 4 4 4 2" in text


@pytest.mark.thorough
def test_ctrl_c_ends_it_at_once_with_all_its_workers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), *QUICK, "--epochs", "1000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stderr is not None
        assert "step" in process.stderr.readline()  # a line of the log: the training goes on
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert out.startswith("stopped after ")
    assert err.count("\n") == 1, err  # the end of the display; no call is complained about
    assert "stopped by KeyboardInterrupt" in err


def test_a_folder_that_cannot_be_written_to_is_told(inside: RunInside, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = inside(EXAMPLE, "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
