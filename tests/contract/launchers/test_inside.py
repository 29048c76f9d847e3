"""``init_rpc()`` without arguments, in programs that ``mpirun`` and ``torchrun`` have started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.contract.launchers.commands import (
    AS_ROOT,
    HELLO,
    LIMIT_S,
    finished,
    greetings,
    joined,
    needed,
    started,
)

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.smoke
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


@pytest.mark.smoke
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


# Calls the other worker until the third agent has joined; ends with an error if that is lost.
ELASTIC = """
import os, time
print("rank", os.environ["RANK"], "of agent", os.environ["AGENT"], flush=True)
import torch
from torchweft import rpc
rpc.init_rpc()
others = [info.name for info in rpc.get_worker_infos() if info != rpc.get_worker_info()]
print("joined", os.environ["AGENT"], "as", rpc.get_worker_info().name, "with", *others, flush=True)
while not os.path.exists(os.environ["THIRD"]):
    time.sleep(0.1)
    rpc.rpc_sync(others[0], torch.add, args=(torch.ones(2), 1))
rpc.shutdown()
"""


@pytest.mark.timeout(120)
def test_an_agent_of_torchrun_is_killed_and_another_joins(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ELASTIC)
    conf = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1"
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--max-restarts=3", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=test"),
        *(f"--rdzv-endpoint={tmp_path / 'store'}", f"--rdzv-conf={conf}"),
        str(tmp_path / "program.py"),
    ]

    @contextmanager
    def run(name: str) -> Iterator[subprocess.Popen[str]]:
        more = {"AGENT": name, "THIRD": str(tmp_path / "third")}
        with started(agent, more, new_session=True) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # The workers as well.

    def line(process: subprocess.Popen[str], beginning: str) -> str:
        assert process.stdout is not None
        found = next((each for each in process.stdout if each.startswith(beginning)), "")
        assert found, process.communicate(timeout=LIMIT_S)
        return found

    with run("first") as first, run("second") as second:
        places = {line(each, "joined").split()[3]: each for each in (first, second)}
        assert places.keys() == {"worker0", "worker1"}
        os.killpg(places["worker0"].pid, signal.SIGKILL)
        with run("third") as third:
            found = {line(each, "joined").strip() for each in (places["worker1"], third)}
            (tmp_path / "third").touch()
            assert [each.wait(LIMIT_S) for each in (places["worker1"], third)] == [0, 0]
    left = "second" if places["worker1"] is second else "first"
    assert found in (
        {f"joined {left} as worker0 with worker1", "joined third as worker1 with worker0"},
        {f"joined {left} as worker1 with worker0", "joined third as worker0 with worker1"},
    )


def test_pods_of_a_pytorch_job() -> None:
    port = unused_port()
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    job |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2"}
    pods = [
        job | {"RANK": str(rank), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1"}
        for rank in (0, 1)
    ]
    out, said = together(pods)
    assert joined(out) == greetings(2), said
    assert f"PyTorchJob: rank 1 of 2, meeting at 127.0.0.1:{port} (RANK, WORLD_SIZE" in said


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
