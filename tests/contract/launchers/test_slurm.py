"""Programs in steps of ``srun``, and ``torchweft run --on slurm``, on a real SLURM of two nodes."""

from __future__ import annotations

import getpass
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchweft
from tests.contract.launchers.commands import (
    HELLO,
    LONG_TRAINING,
    TORCHWEFT,
    environment,
    finished,
    greetings,
    joined,
    started,
    wait_until,
)
from tests.contract.launchers.resuming import Resumed, trained
from tests.contract.launchers.slurm_cluster import NODES, SlurmCluster
from tests.contract.processes.weft_run import read_pids, wait_until_gone
from torchweft import rpc
from torchweft.errors import LaunchError
from torchweft.launch import Slurm

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 60.0
WAITING = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
DYING = "import os, signal; os.environ['RANK'] == '1' and 1 / 0; signal.pause()"
# A shell that runs this test in the background lets it ignore Ctrl-C.
QUEUED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import torchweft
from torchweft.launch import Slurm
with torchweft.cluster(on=Slurm(2)):
    pass
"""
STEPS = 120
RUNNING = ["squeue", "--states=running", "--format=%j"]


def command(*options: str, nodes: int = 2, each: int = 1) -> list[str]:
    given = ["--on", "slurm", "--nodes", str(nodes), "--workers-per-node", str(each)]
    return [*TORCHWEFT, "run", *given, *options]


@pytest.mark.smoke
def test_a_step_of_srun(slurm: SlurmCluster) -> None:
    done = finished(["srun", "-N2", "-n3", sys.executable, HELLO], slurm)
    assert joined(done.stdout) == greetings(3), done.stderr
    assert re.search(r"srun: rank 2 of 3, meeting at 127\.0\.0\.2:\d+ \(SLURM_PROCID", done.stderr)


def test_srun_that_starts_torchrun_on_each_node(slurm: SlurmCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.2:{port}", "--rdzv-id=test"]
    steps = ["srun", "-N2", "--ntasks-per-node=1"]
    done = finished([*steps, *torchrun, *meeting, HELLO], slurm)
    assert joined(done.stdout) == greetings(2), done.stderr


def test_a_batch_script_without_srun_is_told_to_use_it(slurm: SlurmCluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"{sys.executable} {HELLO}"
    finished(["sbatch", "--wait", "-n2", f"--output={out}", "--wrap", script], slurm)
    assert "write 'srun python SCRIPT'" in out.read_text()


def test_a_run_is_submitted_and_its_output_is_shown(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = finished(command(HELLO, each=2), slurm, tmp_path)
    assert done.returncode == 0, done.stderr
    assert joined(done.stdout) == greetings(4)
    assert "[worker3] joined worker3" in done.stdout
    assert "torchweft run: submitted SLURM job " in done.stderr


def test_a_worker_that_dies_ends_the_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    done = finished(command("dying.py"), slurm, tmp_path)
    assert done.returncode == 1
    assert "worker 'worker1' (rank 1, pid " in done.stderr
    assert "[worker1] ZeroDivisionError" in done.stderr


def test_ctrl_c_cancels(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    with started(command("waiting.py"), slurm, tmp_path) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGINT)
        wait_until_gone(pids, LIMIT_S)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "SIGINT, cancelling SLURM job" in err
    assert "SIGINT, ending the workers" in err


def test_a_job_that_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = finished(command("--slurm-options=--partition=none", HELLO), slurm, tmp_path)
    assert done.returncode == 1
    assert "torchweft run: SLURM refuses the job: sbatch: error: invalid partition" in done.stderr


def test_a_pre_empted_job_saves_and_goes_on_from_there(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = command(LONG_TRAINING, str(STEPS), str(tmp_path / "snapshots"))
    with started(run, slurm, tmp_path) as process:
        assert process.stdout is not None
        while "step 9" not in process.stdout.readline():
            assert process.poll() is None
        urgent = ["sbatch", "-p", "high", "-N2", "--exclusive", "--wrap", "true"]
        assert finished([*urgent, "--output=/dev/null"], slurm, tmp_path).returncode == 0
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "job 1 goes back into the queue".replace("1", _job_of(err)) in err
    saved = int(re.search(r"saved step (\d+) in ", err)[1])  # type: ignore[index]
    assert 10 <= saved < STEPS
    assert f"goes on from step {saved}, snapshot" in err
    assert f"step {STEPS - 1}" in out
    result = torch.load(tmp_path / "snapshots" / "result.pt")
    torch.manual_seed(0)
    assert result["steps"] == list(range(STEPS))
    assert torch.equal(result["total"], sum(torch.rand(3) for _ in range(STEPS)))


def test_a_killed_step_is_started_again_and_the_result_is_the_same(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Resumed
) -> None:
    def kill() -> None:
        (job,) = slurm.ask("squeue", "--noheader", "--format=%A").split()
        (step,) = [step for step, node in slurm.steps(job).items() if node == NODES[1]]
        slurm.ask("scancel", "--signal=KILL", step)

    run = command("--restarts", "2", "--backoff", "0.1")
    found = trained(run, tmp_path, slurm, killed_at=4, kill=kill)
    assert [found.begun[0], len(found.begun)] == [0, 2]
    assert found.begun[1] >= 4
    assert found.result == undisturbed.result
    assert f"host '{NODES[1]}' was lost: its agent ended (srun ended with exit code" in found.err
    assert "the group was started again once" in found.err


@pytest.mark.keeps("processes", "descriptors")  # The node's new daemon.
def test_a_job_whose_node_is_gone_is_put_back_into_the_queue(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Resumed
) -> None:
    def kill() -> None:
        (job,) = slurm.ask("squeue", "--noheader", "--format=%A").split()
        slurm.kill_node(NODES[1], job)

    def bring_back(line: str) -> None:
        if "goes back into the queue" in line:
            slurm.start_node(NODES[1])

    run = command("--restarts", "2", "--backoff", "0.1")
    try:
        found = trained(run, tmp_path, slurm, killed_at=4, kill=kill, look=bring_back)
    finally:
        slurm.ask("scancel", "--user", getpass.getuser())
        slurm.start_node(NODES[1])
    assert "a node does not come back; job " in found.err
    assert [found.begun[0], len(found.begun)] == [0, 2]
    assert found.begun[1] >= 4
    assert found.result == undisturbed.result


def _job_of(err: str) -> str:
    return re.search(r"submitted SLURM job (\d+)", err)[1]  # type: ignore[index]


@pytest.mark.keeps("descriptors")  # The first TCP store of a process leaves a pipe open.
@pytest.mark.usefixtures("here")
def test_a_cluster_takes_an_allocation_and_gives_it_back() -> None:
    with torchweft.cluster(on=Slurm(nodes=2)) as cluster:
        for name in cluster.names:
            assert rpc.rpc_sync(name, torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
        assert "torchweft" in finished(RUNNING).stdout
    assert "torchweft" not in finished(RUNNING).stdout


@pytest.fixture
def here(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**slurm, "PYTHONPATH": environment()["PYTHONPATH"]}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("here")
def test_an_allocation_that_is_refused() -> None:
    with (
        pytest.raises(LaunchError, match=r"SLURM refuses the allocation: .*invalid partition"),
        torchweft.cluster(on=Slurm(2, options="--partition=none")),
    ):
        pass


@pytest.fixture
def full_queue(slurm: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    """A job has all nodes."""
    asked = ["sbatch", "--parsable", "-N2", "--exclusive", "--wrap", "sleep 600"]
    job = finished([*asked, "--output=/dev/null"], slurm, tmp_path).stdout.strip()
    wait_until(lambda: slurm.ask(*RUNNING, "--noheader").strip(), LIMIT_S)
    yield
    slurm.ask("scancel", job)
    wait_until_empty(slurm)


def wait_until_empty(slurm: SlurmCluster) -> None:
    wait_until(lambda: not slurm.ask("squeue", "--noheader").strip(), LIMIT_S)


@pytest.mark.usefixtures("here", "full_queue")
def test_a_queue_that_does_not_grant_in_time(
    slurm: SlurmCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(LaunchError, match=r"not granted the allocation within 3 s \(\w+\); ask"),
        torchweft.cluster(on=Slurm(2, timeout=3)),
    ):
        pass
    assert re.search(r"weft: SLURM job \d+ waits in the queue \(\w+\)", capsys.readouterr().err)
    assert not slurm.ask("squeue", "--noheader", "--states=pending").strip()


@pytest.mark.usefixtures("full_queue")
def test_ctrl_c_in_the_queue(slurm: SlurmCluster) -> None:
    with started([sys.executable, "-c", QUEUED], slurm) as process:
        assert process.stderr is not None
        assert "waits in the queue" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert "KeyboardInterrupt" in err
    assert not slurm.ask("squeue", "--noheader", "--states=pending").strip()
