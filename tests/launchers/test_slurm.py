"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import subprocess

import pytest

from tests.contract.launchers.commands import (
    environment,
)
from tests.contract.launchers.slurm_cluster import SlurmCluster
from torchweft.rpc.options import first_of

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("text", ["n[01-03,7],login", "rack1-n[098-101]", "a,b[3]"])
def test_the_first_host_of_a_list_is_that_of_slurm(text: str, slurm: SlurmCluster) -> None:
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(
        command, env=environment(slurm), capture_output=True, text=True, check=True
    )
    assert first_of(text) == done.stdout.split()[0]
