"""torchrl on Weft: its RPC collectors, its replay buffer and its inference server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl", reason="the example is about torchrl")
pytest.importorskip("gymnasium", reason="the example's environment is CartPole")

EXAMPLES = Path(__file__).parents[2] / "examples" / "torchrl"
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs a program to its end; returns the figures that it wrote."""
    done = subprocess.run(
        [sys.executable, *arguments, "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = folder.glob("*.json")
    figures: dict[str, Any] = json.loads(written.read_text())
    return figures


def test_collectors_fill_a_buffer_on_a_worker_and_a_learner_samples_it(tmp_path: Path) -> None:
    program = str(EXAMPLES / "collect.py")
    options = ["--frames", "400", "--batch", "100", "--updates", "5"]
    found = run(tmp_path, "-m", "torchweft.compat", program, *options)
    assert found["rpc"] == "torchweft.compat.rpc"
    assert found["stored"] == 400
    assert len(found["losses"]) == 20
    assert all(math.isfinite(loss) for loss in found["losses"])
    # The reward of a frame is 1, so episodes that have ended are not longer than all frames.
    assert len(found["returns"]) > 2
    assert 100 < sum(found["returns"]) <= 400


def test_collectors_on_workers_ask_one_inference_server(tmp_path: Path) -> None:
    found = run(tmp_path, str(EXAMPLES / "serve.py"), "--frames", "100")
    assert found["collected"] == [100, 100]
    assert found["stored"] == 200
    assert found["same_actions"], "as the policy of this process chooses them"
    assert found["requests"] >= 200
    assert 1 <= found["batches"] <= found["requests"]
