"""A SLURM of this test: a controller and two nodes on this machine, which need no set-up."""

from __future__ import annotations

import contextlib
import getpass
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers.commands import environment, needed, wait_until

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


@contextlib.contextmanager
def running(directory: Path) -> Iterator[dict[str, str]]:
    """Yields the variables by which SLURM's commands find this cluster."""
    daemons = [needed(name, "slurm-wlm, munge") for name in ("munged", "slurmctld", "slurmd")]
    needed("srun", "slurm-wlm")
    _configure(directory)
    variables = {"SLURM_CONF": str(directory / "slurm.conf")}
    munged, controller, node = daemons
    with contextlib.ExitStack() as stack:
        _start(stack, directory, variables, munged, *_munge(directory))
        _await((directory / "munge.socket").exists, directory)
        _start(stack, directory, variables, controller, "-D", "-c")
        for name in NODES:
            _start(stack, directory, variables, node, "-D", "-N", name)
        _await(lambda: _idle_nodes(variables) == len(NODES), directory)
        yield variables


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


def _start(
    stack: contextlib.ExitStack, directory: Path, variables: dict[str, str], *command: str
) -> None:
    output = stack.enter_context((directory / "daemons.log").open("a"))
    process = subprocess.Popen(
        command,
        env=environment(variables),
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

    stack.callback(end)


def _await(is_so: object, directory: Path) -> None:
    begin_s = time.monotonic()
    try:
        wait_until(is_so, START_S)  # type: ignore[arg-type]
    except AssertionError:
        said = (directory / "daemons.log").read_text()[-2000:]
        waited_s = time.monotonic() - begin_s
        pytest.skip(f"SLURM does not start here within {waited_s:.0f} s: {said}")


def _idle_nodes(variables: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
    done = subprocess.run(
        command, env=environment(variables), capture_output=True, text=True, check=False, timeout=30
    )
    return sum(int(word) for word in done.stdout.split() if word.isdigit())
