"""Systems that several files of tests use; each is started once, or its tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launchers import slurm_cluster, sshd
from tests.launchers.slurm_cluster import SlurmCluster
from tests.launchers.sshd import Sshd


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A SLURM of two nodes."""
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A server of ssh, with two hosts."""
    with sshd.running(tmp_path_factory.mktemp("sshd")) as server:
        yield server
