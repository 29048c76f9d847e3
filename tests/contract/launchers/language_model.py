"""The example of the language model, small enough to train within seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.contract.launchers.commands import HERE, finished

LANGUAGE_MODEL = str(HERE.parents[2] / "examples" / "language_model" / "train.py")
TEXT = "".join(
    f"the {i % 7} cat {i % 11} sat on {i % 13} mats and {i % 5} dogs ran. " for i in range(60)
)
# No dropout: its random numbers on the server are drawn in the order in which trainers call.
SMALL = (
    "--epochs 2 --trainers 1 --dropout 0 --batch 4 --window 8 --embedding 16 --hidden 16".split()
)
LIMIT_S = 240.0
WORKERS = 3
"""The driver, the server and one trainer."""
NOISE = 1e-4
"""Relative difference of perplexities whose sums were taken in another order."""


def options(directory: Path) -> list[str]:
    """Returns the options of a small run whose results are in a folder."""
    (directory / "text").write_text(TEXT)
    return [*SMALL, "--data", str(directory / "text"), "--out", str(directory / "out")]


def perplexities_in(directory: Path) -> list[float]:
    """Returns the perplexities of held-out text after each epoch of the run in a folder."""
    figures = json.loads((directory / "out" / "figures.json").read_text())
    (directory / "out" / "figures.json").unlink()
    return [each["perplexity"] for each in figures["held_out"]]


def trained(
    command: Sequence[str], directory: Path, more: Mapping[str, str] | None = None
) -> list[float]:
    """Trains by a command that ends with the example; returns the perplexities."""
    done = finished([*command, *options(directory)], more, directory, LIMIT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    return perplexities_in(directory)


def assert_same(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=NOISE)
