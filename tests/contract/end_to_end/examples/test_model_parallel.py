"""The example with two parts on two workers as a program: it computes the same as one process."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn
from two_parts import RATE, batches, make_first, make_second

from tests.inside import RunInside

FOLDER = Path(__file__).parents[4] / "examples" / "model_parallel"
BATCH = 48
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def trained_alone(n_epochs: int, batch: int) -> list[float]:
    """Returns the losses of the same training in this process."""
    model = nn.Sequential(make_first(), make_second())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for images, labels in batches(n_epochs, batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal(found: list[float], expected: list[float]) -> None:
    """Compares losses; rounding in float32, which differs, grows from step to step.

    On some processors single losses are a seventh apart after 50 steps, but not their mean.
    """
    assert len(found) == len(expected)
    assert found[:5] == pytest.approx(expected[:5], rel=1e-4)
    assert found[:20] == pytest.approx(expected[:20], rel=0.05)
    means = [statistics.mean(losses[20:] or losses) for losses in (found, expected)]
    assert means[0] == pytest.approx(means[1], rel=0.05)


def test_two_workers_learn_what_one_process_learns(inside: RunInside, tmp_path: Path) -> None:
    arguments = ["--epochs", "2", "--batch", str(BATCH), "--split", "12", "--out", str(tmp_path)]
    done = inside(FOLDER / "two_parts.py", *arguments)
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "figures.json").read_text())["losses"]
    assert_equal(losses, trained_alone(2, BATCH))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert done.stdout.startswith(f"{len(losses)} steps in ")
    assert "step" in done.stderr  # the progress


def test_the_ten_lines_of_the_page_do_the_same(
    inside: RunInside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(code.replace("n_epochs=6", "n_epochs=1"))
    monkeypatch.syspath_prepend(str(FOLDER))
    done = inside(program)
    assert done.returncode == 0, done.stderr
    assert_equal([float(line) for line in done.stdout.split()], trained_alone(1, 64))
