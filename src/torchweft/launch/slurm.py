"""The launcher on SLURM: in an allocation, the workers' hosts are its nodes; outside, it gets one.

``torchweft run --on slurm`` outside of an allocation submits a batch job that runs the same
command, shows its output and cancels it with Ctrl-C. In the job, and in the shell of ``salloc``,
the command starts an agent on each node by ``srun``. A cluster outside of an allocation takes one
by ``salloc``, which ends with this process, however it ends.

SLURM sends ``SIGTERM`` to the agents, or to the batch script, before it takes the nodes away. The
workers get notice: ``torchweft.checkpoint.resumable`` saves and ends its program, and the job is
put back into the queue, unless it was cancelled.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.host_connection import Host
from torchweft.launch.hosts import HostNurseries
from torchweft.launch.hosts_launcher import HostsLauncher
from torchweft.launch.launchers import Order
from torchweft.launch.slurm_job import BatchJob, ask, state_of

if TYPE_CHECKING:
    from torchweft.launch.local_cluster import Cluster
    from torchweft.launch.run import Run
    from torchweft.launch.terms import Terms

_ANSWER_S = 60.0
_RELEASE_S = 15.0
_COMMANDS = ("sbatch", "srun", "salloc", "scontrol", "scancel")


class Slurm(HostsLauncher):
    """Starts workers on the nodes of a SLURM job.

    Args:
        nodes: How many nodes; in an allocation, by default all of it.
        workers_per_node: How many workers on each node.
        options: Further options of ``sbatch`` or ``salloc``, such as ``"--partition=gpu"``.
        python: The interpreter on the nodes; by default the path of this one.

    Raises:
        ConfigurationError: A number is invalid, or SLURM's commands are missing here.
    """

    def __init__(
        self,
        nodes: int | None = None,
        workers_per_node: int = 1,
        *,
        options: str = "",
        python: str = sys.executable,
    ) -> None:
        for name, number in (("nodes", nodes), ("workers_per_node", workers_per_node)):
            if number is not None and number < 1:
                raise ConfigurationError(f"{name} is {number}; it must be at least 1")
        missing = [command for command in _COMMANDS if shutil.which(command) is None]
        if missing:
            raise ConfigurationError(
                f"there is no command {missing[0]!r} here; start the run on a login node or in a "
                "job of SLURM (Debian: slurm-client), or choose another launcher with --on"
            )
        self._job = _job_here(os.environ)
        allocated = _nodes(os.environ["SLURM_JOB_NODELIST"]) if self._job else []
        self._nodes = nodes or len(allocated) or 1
        self._allocated = allocated
        self._workers_per_node = workers_per_node
        self._options = shlex.split(options)
        self.python = python
        self._nurseries: HostNurseries | None = None
        self._is_given_up = False
        if self._job and self._nodes > len(allocated):
            raise ConfigurationError(
                f"{nodes} nodes are wanted, but job {self._job} has {len(allocated)}; leave the "
                "number out, or ask salloc or sbatch for more"
            )

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        """Adds the options of ``--on slurm``."""
        parser.add_argument("--nodes", type=int, metavar="N", help="how many nodes (default: 1)")
        parser.add_argument(
            "--workers-per-node", type=int, default=1, metavar="N", help="workers on each node"
        )
        parser.add_argument(
            "--slurm-options", default="", metavar="TEXT", help="further options of sbatch"
        )
        parser.add_argument(
            "--python", default=sys.executable, metavar="PATH", help="the interpreter there"
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Slurm:
        """Returns the launcher that the command line describes."""
        return cls(
            options.nodes,
            options.workers_per_node,
            options=options.slurm_options,
            python=options.python,
        )

    def count(self, wanted: int | None) -> int:
        """Returns how many workers the nodes have.

        Raises:
            ConfigurationError: Another number is wanted.
        """
        count = self._nodes * self._workers_per_node
        if wanted not in (None, count):
            raise ConfigurationError(
                f"{wanted} workers are wanted, but {self._nodes} nodes with "
                f"{self._workers_per_node} workers each make {count}; leave the number out, or "
                "change --nodes and --workers-per-node"
            )
        return count

    def hosts(self, workers: int) -> Sequence[Host]:
        """Returns the nodes of the allocation."""
        return self._hosts_of(self._job, self._allocated[: self._nodes])

    def run(self, order: Order) -> int:
        """Runs a script on the nodes of this job, or submits a job that does and follows it.

        Raises:
            LaunchError: SLURM refuses the job; says why.
        """
        if self._job:
            return super().run(order)
        script = shlex.join([self.python, "-m", "torchweft", *order.arguments])
        job = BatchJob.submit(f"#!/bin/sh\nexec {script}\n", self._requirements())
        return job.follow(order.console)

    def open(
        self,
        hosts: Sequence[Host],
        placed: Mapping[str, Host],
        preload: Sequence[str],
        environment: Mapping[str, str],
    ) -> HostNurseries:
        """Starts the agents of the nodes; a signal from SLURM is a notice to all workers."""
        nurseries = HostNurseries(
            hosts, placed, preload=preload, environment=environment, on_signal=self._give_up
        )
        self._nurseries = nurseries
        return nurseries

    def follow(self, run: Run, nurseries: HostNurseries, order: Order) -> int:
        """Follows a run to its end; a job that is pre-empted goes back into the queue."""
        run.on_terminate = self._give_up
        status = run.to_the_end()
        if status and self._is_given_up and state_of(self._job) != "CANCELLED":
            order.console.announce(
                f"torchweft run: SLURM takes the nodes away; job {self._job} goes back into the "
                "queue"
            )
            ask("scontrol", "requeue", self._job)
        return status

    def _give_up(self) -> bool:
        """Gives the workers notice; returns False if the job is not to go on later."""
        if state_of(self._job) == "CANCELLED":
            return False
        self._is_given_up = True
        if self._nurseries is not None:
            self._nurseries.notify()
        return True

    def cluster(self, terms: Terms) -> Cluster:
        """Returns a cluster of workers on the nodes, around this process."""
        launcher = self if self._job else _Allocating(self)
        return HostsLauncher.cluster(launcher, terms)

    def _requirements(self) -> list[str]:
        each = f"--ntasks-per-node={self._workers_per_node}"
        return [f"--nodes={self._nodes}", each, *self._options]

    def _hosts_of(self, job: str, nodes: Sequence[str]) -> list[Host]:
        return [
            Host(node, node, self._workers_per_node, self._srun(job, node), _ANSWER_S)
            for node in nodes
        ]

    def _srun(self, job: str, node: str) -> tuple[str, ...]:
        return (
            *("srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"),
            *("--overlap", "--mpi=none", "--cpu-bind=none", "--unbuffered", "--quiet"),
            *(self.python, "-m", "torchweft.launch.host_agent"),
        )


class _Allocating(Slurm):
    """Takes an allocation for the time of one cluster."""

    def __init__(self, asked: Slurm) -> None:
        self.__dict__.update(asked.__dict__)
        self._salloc: subprocess.Popen[str] | None = None
        self._is_granted = False

    def hosts(self, workers: int) -> Sequence[Host]:
        """Waits for an allocation, and returns its nodes."""
        # The command in the allocation ends with its input, so with this process.
        tell = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'
        self._salloc = subprocess.Popen(
            ["salloc", "--job-name=torchweft", *self._requirements(), "sh", "-c", tell],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._salloc.stdout is not None
        job, _, nodes = self._salloc.stdout.readline().strip().partition(" ")
        if not nodes:
            _, said = self._salloc.communicate()
            self._salloc = None
            raise LaunchError(f"SLURM refuses the allocation: {' / '.join(said.split(chr(10)))}")
        self._is_granted = True
        return self._hosts_of(job, _nodes(nodes))

    def release(self) -> None:
        """Gives the allocation back, and waits."""
        salloc, self._salloc = self._salloc, None
        if salloc is None:
            return
        if not self._is_granted:
            salloc.terminate()  # it still waits in the queue
        try:
            salloc.communicate(timeout=_RELEASE_S)
        except subprocess.TimeoutExpired:
            salloc.kill()
            salloc.communicate()


def _job_here(variables: Mapping[str, str]) -> str:
    """Returns the job whose allocation this process may use; empty in a step of a job."""
    step = variables.get("SLURM_STEP_ID", "")
    is_task = step.isdigit() and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return "" if is_task else variables.get("SLURM_JOB_ID", "")


def _nodes(text: str) -> list[str]:
    return ask("scontrol", "show", "hostnames", text).split()
