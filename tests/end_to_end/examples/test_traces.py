"""Traces of the examples, run as they are: each holds every call that the counters hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.trace_reader import Found, read_trace
from torchweft.observe.tracing.reading import load, summary

ROOT = Path(__file__).parents[3]
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(LIMIT_S + 20)

EXAMPLES = {
    "embedding": "train.py --steps 3 --batch 64 --staleness 1 --servers 1",
    "language_model": "train.py --batch 256 --embedding 16 --hidden 16 --epochs 1",
    "meta_learning": "train.py sinusoid --iterations 1 --tasks 2 --double",
    "model_parallel": "two_parts.py --epochs 1 --batch 512 --split 12",
    "pipeline": "train.py --workers 2 --blocks 4 --epochs 1 --batch 512 --microbatches 4",
    "reinforcement_learning": "train.py a2c --steps 600",
    "samplers": "train.py --steps 5 --pause 0.01",
}
SEES = {
    "embedding": "run",
    "language_model": "optimizer",
    "meta_learning": "backward",
    "model_parallel": "backward",
    "pipeline": "receive",
    "reinforcement_learning": "run",
    "samplers": "run",
}
"""A category that each of them must have."""
ALWAYS = "reinforcement_learning"
"""The one whose trace is made each time; the others are thorough."""


@pytest.mark.parametrize(
    "name",
    [
        name if name == ALWAYS else pytest.param(name, marks=pytest.mark.thorough)
        for name in EXAMPLES
    ],
)
def test_the_trace_of_an_example_has_all_of_its_calls(name: str, tmp_path: Path) -> None:
    program, *arguments = EXAMPLES[name].split()
    path = tmp_path / "trace.json"
    folders = [ROOT / "tests/programs/tracing", ROOT / "src", ROOT]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "WEFT_COUNTERS": "1",
        "TRACED": str(path),
    }
    out = ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, program, *arguments, *out],
        cwd=ROOT / "examples" / name,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_trace(path)
    assert found.about["missing"] == {}
    assert not any(each["dropped"] for each in found.about["workers"])
    counts = json.loads(Path(f"{path}.counts").read_text())
    assert calls_in(found) == {worker: each for worker, each in counts.items() if each}
    assert found.of(SEES[name])
    for flow in found.flows.values():
        assert flow[0]["ts"] <= flow[-1]["ts"]
    titles = [each.title for each in summary(load(path)) if not isinstance(each, str)]
    assert "slowest calls" in titles


def calls_in(found: Found) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for event in found.slices:
        direction = {"call": "out", "create": "out", "run": "in"}.get(event["cat"])
        if direction and not event["args"]["function"].startswith("sitecustomize."):
            worker = counts.setdefault(found.worker_of(event), Counter())
            worker[f"{direction} {event['args']['function']}"] += 1
    return {worker: dict(each) for worker, each in counts.items()}
