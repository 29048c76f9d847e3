"""The inference server as a program: many clients, batches, and answers as if each were alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.inside import RunInside

EXAMPLE = Path(__file__).parents[4] / "examples" / "inference_server" / "serve.py"
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def test_clients_share_batches_and_get_their_own_answers(inside: RunInside, tmp_path: Path) -> None:
    arguments = ["--clients", "2", "--threads", "8", "--requests", "30", "--out", str(tmp_path)]
    done = inside(EXAMPLE, *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["one by one", "batched"]
    found = json.loads((tmp_path / "figures.json").read_text())
    for way in ("one by one", "batched"):
        assert found[way]["answers"] == 2 * 8 * 30
        assert found[way]["largest_difference"] < 1e-5
        assert 0 < found[way]["median_ms"] <= found[way]["p99_ms"]
    batches = found["batches"]
    assert f"{batches['batches']:,} batches for 480 requests" in lines[2]
    assert 1 < batches["mean_size"] <= batches["largest_size"] <= 16
    assert batches["failed"] == batches["refused"] == 0
