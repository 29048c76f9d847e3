"""``init_rpc()`` without arguments, in programs that ``mpirun`` and ``torchrun`` have started."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.kubernetes_pods import fields_of, pod_of, variables_of
from tests.launchers.commands import HELLO, LIMIT_S, finished, greetings, joined, needed, started
from torchweft.launch.kubernetes_manifest import job_set, train_job
from torchweft.launch.kubernetes_pods import Pods
from torchweft.secret import write_new

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


def unused_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return str(held.getsockname()[1])


def together(each: list[dict[str, str]]) -> tuple[str, str]:
    """Runs the program in one process for each set of variables; returns what they print."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started([sys.executable, HELLO], variables)) for variables in each
        ]
        printed = [process.communicate(timeout=LIMIT_S) for process in processes]
    return "".join(out for out, _ in printed), "".join(said for _, said in printed)


def test_pods_of_a_job_set_and_of_a_train_job(tmp_path: Path) -> None:
    write_new(tmp_path / "secret")
    here = {"WEFT_SECRET_FILE": str(tmp_path / "secret"), "HOME": str(tmp_path)}
    pods = Pods(image="r/train:1", command=["python", HELLO], name="demo", workers=2)
    port = unused_port()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job = pod_of(job_set(pods))
    out, said = together([variables_of(job, fields_of(rank)) | here | meeting for rank in (0, 1)])
    assert joined(out) == greetings(2), said
    assert f"JobSet: rank 1 of 2, meeting at 127.0.0.1:{port} (RANK, WORLD_SIZE" in said

    port = unused_port()
    kubeflow = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }
    job = pod_of(train_job(pods)[0]["spec"]["template"])
    out, said = together(
        [
            variables_of(job, fields_of(rank)) | here | kubeflow | {"PET_NODE_RANK": str(rank)}
            for rank in (0, 1)
        ]
    )
    assert joined(out) == greetings(2), said
    assert f"Kubeflow: rank 1 of 2, meeting at 127.0.0.1:{port}" in said


def test_nodes_of_skypilot() -> None:
    port = unused_port()
    task = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "MASTER_PORT": port,
    }
    out, said = together([task | {"SKYPILOT_NODE_RANK": str(rank)} for rank in (0, 1)])
    assert joined(out) == greetings(2), said
    assert f"SkyPilot: rank 1 of 2, meeting at 127.0.0.1:{port} (SKYPILOT_NODE_RANK" in said
