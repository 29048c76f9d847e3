"""The example of the language model starts unchanged on each launcher, and learns the same.

``test_ray.py`` has the same test, as it has the cluster of Ray.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contract.launchers import language_model
from tests.contract.launchers.commands import AS_ROOT, TORCHWEFT, environment, needed
from tests.contract.launchers.language_model import (
    LANGUAGE_MODEL,
    LIMIT_S,
    assert_same,
    options,
    perplexities_in,
    trained,
)
from tests.contract.launchers.slurm_cluster import SlurmCluster
from tests.contract.launchers.sshd import Sshd

pytestmark = pytest.mark.timeout(300)

INSIDE = [LANGUAGE_MODEL, "--inside"]
WORKERS = str(language_model.WORKERS)


@pytest.mark.keeps("descriptors")  # The client of the kernel keeps its event loop.
def test_in_a_notebook(perplexities: list[float], tmp_path: Path) -> None:
    for package in ("nbformat", "ipykernel"):
        pytest.importorskip(package)
    client = pytest.importorskip("nbclient")
    import nbformat

    cells = [nbformat.v4.new_code_cell(f"%run {' '.join([LANGUAGE_MODEL, *options(tmp_path)])}")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    context = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources=context
    ).execute(env=environment())
    assert "figures.json and state.pt" in str(notebook.cells[0].outputs)
    assert_same(perplexities_in(tmp_path), perplexities)


def test_torchweft_run(perplexities: list[float], tmp_path: Path) -> None:
    assert_same(trained([*TORCHWEFT, "run", "-n", WORKERS, *INSIDE], tmp_path), perplexities)


def test_torchrun(perplexities: list[float], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", WORKERS, *INSIDE]
    assert_same(trained(command, tmp_path), perplexities)


def test_mpirun(perplexities: list[float], tmp_path: Path) -> None:
    mpirun = [needed("mpirun", "openmpi-bin"), "--oversubscribe", "-n", WORKERS]
    assert_same(trained([*mpirun, sys.executable, *INSIDE], tmp_path, AS_ROOT), perplexities)


def test_ssh(server: Sshd, perplexities: list[float], tmp_path: Path) -> None:
    hosts = ["--hosts", "alpha:2,beta", "--ssh-options", server.options]
    assert_same(
        trained([*TORCHWEFT, "run", "--on", "ssh", *hosts, *INSIDE], tmp_path), perplexities
    )


def test_a_cluster_over_ssh(server: Sshd, perplexities: list[float], tmp_path: Path) -> None:
    on = f"ssh --hosts alpha,beta --ssh-options '{server.options}'"
    assert_same(trained([sys.executable, LANGUAGE_MODEL, "--on", on], tmp_path), perplexities)


def test_srun(slurm: SlurmCluster, perplexities: list[float], tmp_path: Path) -> None:
    srun = ["srun", "-N2", f"-n{WORKERS}", sys.executable]
    assert_same(trained([*srun, *INSIDE], tmp_path, slurm), perplexities)


def test_sbatch(slurm: SlurmCluster, perplexities: list[float], tmp_path: Path) -> None:
    nodes = ["--on", "slurm", "--nodes", "1", "--workers-per-node", WORKERS]
    assert_same(trained([*TORCHWEFT, "run", *nodes, *INSIDE], tmp_path, slurm), perplexities)


def test_a_cluster_in_an_allocation(
    slurm: SlurmCluster, perplexities: list[float], tmp_path: Path
) -> None:
    on = "slurm --nodes 2"
    command = [sys.executable, LANGUAGE_MODEL, "--on", on]
    assert_same(trained(command, tmp_path, slurm), perplexities)
