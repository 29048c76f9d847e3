"""``init_rpc()`` without arguments, in programs that ``mpirun`` and ``torchrun`` have started."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launchers.commands import HELLO, finished, greetings, joined, needed

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def test_mpirun() -> None:
    mpirun = needed("mpirun", "openmpi-bin")
    done = finished([mpirun, "--oversubscribe", "-n", "2", sys.executable, HELLO], AS_ROOT)
    assert joined(done.stdout) == greetings(2), done.stderr
    assert "mpirun of Open MPI: rank 1 of 2, meeting at 127.0.0.1:" in done.stderr


def test_a_rank_that_contradicts_mpirun() -> None:
    mpirun = needed("mpirun", "openmpi-bin")
    command = [mpirun, "--oversubscribe", "-n", "2", "-x", "RANK=0", sys.executable, HELLO]
    done = finished(command, AS_ROOT)
    assert done.returncode != 0
    assert "RANK is 0, but OMPI_COMM_WORLD_RANK of mpirun of Open MPI is 1; unset" in done.stderr


def test_torchrun() -> None:
    done = finished([*TORCHRUN, "--standalone", HELLO])
    assert joined(done.stdout) == greetings(2), done.stderr
    assert "torchrun: rank 1 of 2, meeting at " in done.stderr


def test_torchrun_that_starts_its_workers_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = Path(HELLO).read_text()
    death = (
        "import os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and me.id == 1: sys.exit(3)\n"
    )
    program.write_text(text.replace("print(", death + "print(", 1))
    done = finished([*TORCHRUN, "--standalone", "--max-restarts", "1", str(program)])
    assert done.returncode == 0, done.stderr
    assert set(greetings(2)) <= set(joined(done.stdout))
