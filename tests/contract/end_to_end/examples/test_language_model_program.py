"""The language model of ``examples/`` as a program: its files, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from checkpoint import load_checkpoint

from tests.inside import RunInside

EXAMPLE = Path(__file__).parents[4] / "examples" / "language_model"
PROGRAM = [sys.executable, str(EXAMPLE / "train.py")]
QUICK = ["--batch", "32", "--embedding", "16", "--hidden", "16"]


def test_the_program_leaves_figures_a_picture_and_a_state(
    inside: RunInside, tmp_path: Path
) -> None:
    done = inside(EXAMPLE / "train.py", *QUICK, "--epochs", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "perplexity, unigram model" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [point["step"] for point in figures["held_out"]] == [34, 68]
    assert figures["result"]["held_out_perplexity"] < figures["held_out"][0]["perplexity"]
    assert {path.name for path in tmp_path.iterdir()} >= {"figures.json", "state.pt"}


def test_ctrl_c_stops_everything_and_the_run_can_be_gone_on_with(tmp_path: Path) -> None:
    endless = [*PROGRAM, *QUICK, "--epochs", "10000", "--out", str(tmp_path)]
    with subprocess.Popen(
        endless, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        # A slow machine prints progress lines before it.
        assert any(line.startswith("after epoch  1") for line in program.stdout)
        os.killpg(program.pid, signal.SIGINT)  # to the whole group, as a terminal does
        pressed = time.monotonic()
        output = program.stdout.read()  # ends when no worker holds the pipe
        stopped_s = time.monotonic() - pressed
    assert program.returncode == 130
    assert stopped_s < 8  # Leaving in order may take 30 s; a busy machine takes 4 to end at once.
    steps = len(load_checkpoint(tmp_path / "state.pt").history.losses)
    assert f"stopped; the state of step {steps:,} is in {tmp_path / 'state.pt'}" in output

    epochs = steps // 34 + 1
    again = ["--resume", str(tmp_path / "state.pt"), "--epochs", str(epochs)]
    subprocess.run([*PROGRAM, *again, "--out", str(tmp_path / "again")], check=True, timeout=150)
    figures = json.loads((tmp_path / "again" / "figures.json").read_text(encoding="utf-8"))
    assert figures["settings"]["embedding"] == 16
    assert len(figures["loss"]) == epochs * 34
