"""A SLURM of this test: a controller and two nodes on this machine, which need no set-up."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.launchers.commands import environment, needed, wait_until

NODES = ("127.0.0.2", "127.0.0.3")
START_S = 30.0

CONFIGURATION = """\
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/node-%n.pid
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/node-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=3
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName={nodes[0]} Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName={nodes[1]} Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP
"""


class SlurmCluster(dict[str, str]):
    """The variables by which SLURM's commands find this cluster, and its nodes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(SLURM_CONF=str(directory / "slurm.conf"))
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        daemons = [needed(name, "slurm-wlm, munge") for name in ("munged", "slurmctld", "slurmd")]
        needed("srun", "slurm-wlm")
        _configure(self._directory)
        munged, controller, _ = daemons
        self._start(munged, *_munge(self._directory))
        _await((self._directory / "munge.socket").exists, self._directory)
        self._start(controller, "-D", "-c")
        for name in NODES:
            self.start_node(name)
        _await(self.is_idle, self._directory)

    def start_node(self, name: str) -> None:
        """Starts the daemon of a node, unless it runs."""
        if name in self._nodes and self._nodes[name].poll() is None:
            return
        slurmd = needed("slurmd", "slurm-wlm, munge")
        self._nodes[name] = self._start(slurmd, "-D", "-N", name)

    def kill_node(self, name: str, job: str) -> None:
        """Kills the daemon of a node and the programs of a job there: no step can start again."""
        steps = self.steps(job)
        self._nodes[name].kill()
        self._nodes[name].wait()
        for step, node in steps.items():
            if node == name:
                for pid in _programs_of(step):
                    os.kill(pid, signal.SIGKILL)

    def steps(self, job: str) -> dict[str, str]:
        """Returns the nodes of the steps of a job."""
        lines = self.ask("squeue", "--steps", "--noheader", "--format=%i %N").splitlines()
        found = dict(line.split() for line in lines)
        return {step: node for step, node in found.items() if step.startswith(f"{job}.")}

    def is_idle(self) -> bool:
        """Whether all nodes are there and free."""
        command = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
        free = sum(int(word) for word in self.ask(*command).split() if word.isdigit())
        return free == len(NODES)

    def ask(self, *command: str) -> str:
        """Returns what a command of SLURM prints."""
        return subprocess.run(
            command, env=environment(self), capture_output=True, text=True, check=False, timeout=30
        ).stdout

    def close(self) -> None:
        self._stack.close()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._directory / "daemons.log").open("a"))
        process = subprocess.Popen(
            command,
            env=environment(self),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

        def end() -> None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self._stack.callback(end)
        return process


@contextlib.contextmanager
def running(directory: Path) -> Iterator[SlurmCluster]:
    with contextlib.closing(SlurmCluster(directory)) as cluster:
        cluster.start()
        yield cluster


def _programs_of(step: str) -> list[int]:
    """Returns the processes that SLURM has started for a step."""
    title = f"slurmstepd: [{step}]".encode()
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (each / "cmdline").read_bytes().startswith(title):
                for children in each.glob("task/*/children"):
                    found += map(int, children.read_text().split())
    return found


def _configure(directory: Path) -> None:
    (directory / "key").write_bytes(secrets.token_bytes(128))
    (directory / "key").chmod(0o600)
    (directory / "state").mkdir()
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            user=getpass.getuser(),
            directory=directory,
            ports=[each.getsockname()[1] for each in free],
            nodes=NODES,
        )
    (directory / "slurm.conf").write_text(text)


def _munge(directory: Path) -> list[str]:
    places = {"socket": "munge.socket", "key-file": "key", "pid-file": "munge.pid"}
    places |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    options = [f"--{option}={directory / name}" for option, name in places.items()]
    return ["--foreground", "--force", *options]


def _await(is_so: object, directory: Path) -> None:
    begin_s = time.monotonic()
    try:
        wait_until(is_so, START_S)  # type: ignore[arg-type]
    except AssertionError:
        said = (directory / "daemons.log").read_text()[-2000:]
        waited_s = time.monotonic() - begin_s
        pytest.skip(f"SLURM does not start here within {waited_s:.0f} s: {said}")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A SLURM of two nodes."""
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
