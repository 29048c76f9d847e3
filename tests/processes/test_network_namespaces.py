"""Two workers that only a network connects: each is in a network namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import namespace_program
from tests.processes.hosts import Host, network
from weft import secret

PROGRAM = Path(namespace_program.__file__)
ROOT = PROGRAM.parents[2]
LIMIT_S = 100.0


def start(rank: int, host: Host, folder: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # Processes of one host and user may read each other's memory whatever their network.
        "WEFT_CMA_FROM_BYTES": str(1 << 60),
        "WEFT_SECRET_FILE": str(folder / "secret"),
        "WEFT_STRIPED_FROM_BYTES": str(1 << 19),
    }
    command = ["ip", "netns", "exec", host.namespace, sys.executable, str(PROGRAM)]
    return subprocess.Popen(
        [*command, str(rank), str(folder / "store"), host.address],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(2 * LIMIT_S)
def test_tensors_cross_a_network(tmp_path: Path) -> None:
    secret.write_new(tmp_path / "secret")
    with network() as hosts:
        workers = [start(rank, host, tmp_path) for rank, host in enumerate(hosts)]
        try:
            outputs = [worker.communicate(timeout=LIMIT_S) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    found = json.loads(outputs[0][0])
    assert found["wrong"] == []
    assert found["family"] == "AF_INET"
    assert found["way"] == "STRIPED"
    assert found["data families"] == ["AF_INET"] * len(found["data families"])
    large = [size for size in namespace_program.SIZES if size >= 1 << 19]
    assert found["received"] == sum(large)
