"""torchrl on Weft: its RPC collectors, its replay buffer and its inference server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl", reason="the example is about torchrl")
pytest.importorskip("gymnasium", reason="the example's environment is CartPole")

EXAMPLES = Path(__file__).parents[3] / "examples" / "torchrl"
LIMIT_S = 240.0
"""For one program; most of it is the start of processes that import torch and torchrl."""

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


@pytest.mark.thorough
def test_a_service_answers_requests_with_metadata_of_other_workers(tmp_path: Path) -> None:
    pytest.importorskip("torchrl._comm.request_reply", reason="a private module of torchrl 0.14")
    found = run(tmp_path, str(EXAMPLES / "channel.py"), "--requests", "30")
    assert found["requests"] == 60
    assert 1 <= found["batches"] <= 60
    assert found["refused"] == "me sent other observations"
    drawn = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        drawn += [torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(30)]
    expected = torch.cat(drawn).mean(0)
    last = [torch.tensor(each, dtype=torch.float64) for each in found["means"]]
    assert any(torch.allclose(each, expected) for each in last), "the last answer has all of them"
