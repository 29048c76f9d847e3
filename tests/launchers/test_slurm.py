"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import subprocess

import pytest

from tests.contract.launchers.commands import (
    environment,
)
from tests.contract.launchers.slurm_cluster import SlurmCluster
from torchweft.rpc.placement import expand

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("text", ["n[01-03,7],login", "rack1-n[098-101]", "a,b[3]"])
def test_lists_of_hosts_mean_what_slurm_says(text: str, slurm: SlurmCluster) -> None:
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(
        command, env=environment(slurm), capture_output=True, text=True, check=True
    )
    assert expand(text) == done.stdout.split()
