"""The example of the language model starts unchanged on each launcher, and learns the same.

``test_ray.py`` has the same test, as it has the cluster of Ray.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launchers.commands import AS_ROOT, TORCHWEFT, environment, needed
from tests.launchers.language_model import (
    LANGUAGE_MODEL,
    LIMIT_S,
    NOISE,
    options,
    perplexities,
    trained,
)
from tests.launchers.slurm_cluster import SlurmCluster
from tests.launchers.sshd import Sshd

pytestmark = pytest.mark.timeout(300)

INSIDE = [LANGUAGE_MODEL, "--inside"]
WORKERS = "4"
"""The driver, the server and two trainers."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The perplexities of ``python train.py`` on this machine."""
    found = trained([sys.executable, LANGUAGE_MODEL], tmp_path_factory.mktemp("script"))
    assert found[1] < found[0]
    return found


def assert_same(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=NOISE)


@pytest.mark.keeps("descriptors")  # The client of the kernel keeps its event loop.
def test_in_a_notebook(expected: list[float], tmp_path: Path) -> None:
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
    assert_same(perplexities(tmp_path), expected)


def test_torchweft_run(expected: list[float], tmp_path: Path) -> None:
    assert_same(trained([*TORCHWEFT, "run", "-n", WORKERS, *INSIDE], tmp_path), expected)


def test_torchrun(expected: list[float], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", WORKERS, *INSIDE]
    assert_same(trained(command, tmp_path), expected)


def test_mpirun(expected: list[float], tmp_path: Path) -> None:
    mpirun = [needed("mpirun", "openmpi-bin"), "--oversubscribe", "-n", WORKERS]
    assert_same(trained([*mpirun, sys.executable, *INSIDE], tmp_path, AS_ROOT), expected)


def test_ssh(server: Sshd, expected: list[float], tmp_path: Path) -> None:
    hosts = ["--hosts", "alpha:2,beta:2", "--ssh-options", server.options]
    assert_same(trained([*TORCHWEFT, "run", "--on", "ssh", *hosts, *INSIDE], tmp_path), expected)


def test_a_cluster_over_ssh(server: Sshd, expected: list[float], tmp_path: Path) -> None:
    on = f"ssh --hosts alpha:2,beta --ssh-options '{server.options}'"
    assert_same(trained([sys.executable, LANGUAGE_MODEL, "--on", on], tmp_path), expected)


def test_srun(slurm: SlurmCluster, expected: list[float], tmp_path: Path) -> None:
    srun = ["srun", "-N2", f"-n{WORKERS}", sys.executable]
    assert_same(trained([*srun, *INSIDE], tmp_path, slurm), expected)


def test_sbatch(slurm: SlurmCluster, expected: list[float], tmp_path: Path) -> None:
    nodes = ["--on", "slurm", "--nodes", "2", "--workers-per-node", "2"]
    assert_same(trained([*TORCHWEFT, "run", *nodes, *INSIDE], tmp_path, slurm), expected)


def test_a_cluster_in_an_allocation(
    slurm: SlurmCluster, expected: list[float], tmp_path: Path
) -> None:
    on = "slurm --nodes 1 --workers-per-node 3"
    command = [sys.executable, LANGUAGE_MODEL, "--on", on]
    assert_same(trained(command, tmp_path, slurm), expected)
