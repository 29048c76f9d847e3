"""The launcher on SLURM: in an allocation, the workers' hosts are its nodes; outside, it gets one.

``torchweft run --on slurm`` outside of an allocation submits a batch job that runs the same
command, shows its output and cancels it with Ctrl-C. In the job, and in the shell of ``salloc``,
the command starts an agent on each node by ``srun``. A cluster outside of an allocation takes one
by ``salloc``, which ends with this process, however it ends.

SLURM sends ``SIGTERM`` to the agents, or to the batch script, before it takes the nodes away. The
workers get notice: ``torchweft.checkpoint.resumable`` saves and ends its program, and the job is
put back into the queue, unless it was cancelled.

A step that is lost, such as one that ran out of memory, is a death of its workers. The restarts of
the run cover it: the agent starts again in a new step on the same node. If it does not, the job is
put back into the queue, to get other nodes. SLURM itself does that with a node that it knows to be
lost.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.console import session_console
from torchweft.launch.hosts import Host, HostNurseries
from torchweft.launch.hosts_launcher import HostsLauncher
from torchweft.launch.run import Order, Run
from torchweft.launch.slurm_allocation import Allocation
from torchweft.launch.slurm_job import BatchJob, ask, fields_of, state_of

if TYPE_CHECKING:
    from torchweft.launch.clusters import Cluster
    from torchweft.launch.terms import Terms

_ANSWER_S = 60.0
TIMEOUT_S = 3600.0
"""Seconds in the queue, within which a cluster must have its allocation."""
_COMMANDS = ("sbatch", "srun", "salloc", "scontrol", "scancel")


class Slurm(HostsLauncher):
    """Starts workers on the nodes of a SLURM job.

    Args:
        nodes: How many nodes; in an allocation, by default all of it.
        workers_per_node: How many workers on each node.
        options: Further options of ``sbatch`` or ``salloc``, such as ``"--partition=gpu"``.
        python: The interpreter on the nodes; by default the path of this one.
        timeout: Seconds within which a cluster must have its allocation, if it takes one; infinite
            for no limit.

    Raises:
        ConfigurationError: A number is invalid, or SLURM's commands are missing here.
    """

    replaces_hosts = True

    def __init__(
        self,
        nodes: int | None = None,
        workers_per_node: int = 1,
        *,
        options: str = "",
        python: str = sys.executable,
        timeout: float = TIMEOUT_S,
    ) -> None:
        for name, number in (("nodes", nodes), ("workers_per_node", workers_per_node)):
            if number is not None and number < 1:
                raise ConfigurationError(f"{name} is {number}; it must be at least 1")
        if math.isnan(timeout) or timeout <= 0:
            raise ConfigurationError(f"timeout is {timeout}; it must be more than 0 seconds")
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
        self._timeout_s = timeout
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
        """Follows a run to its end; a job that loses its nodes goes back into the queue."""
        run.on_terminate = self._give_up
        status = run.to_the_end()
        if not status:
            return status
        why = "SLURM takes the nodes away" if self._is_given_up else ""
        if nurseries.is_short and _requeues(os.environ) < order.restarts.limit:
            why = why or "a node does not come back"
        if why and _may_requeue(self._job):
            order.console.announce(
                f"torchweft run: {why}; job {self._job} goes back into the queue"
            )
            ask("scontrol", "requeue", self._job)
        return status

    def _give_up(self) -> bool:
        """Gives the workers notice; returns False if the job is not to go on later."""
        if state_of(self._job) == "CANCELLED":
            return False
        self._is_given_up = True
        if self._nurseries is not None:
            self._nurseries.replaces_lost = False
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
        self._allocation: Allocation | None = None

    def hosts(self, workers: int) -> Sequence[Host]:
        """Waits for an allocation, and returns its nodes."""
        self._allocation = Allocation(self._requirements())
        console = session_console()
        job, nodes = self._allocation.wait(
            self._timeout_s, lambda text: console.announce(f"weft: {text}")
        )
        return self._hosts_of(job, _nodes(nodes))

    def release(self) -> None:
        """Gives the allocation back, and waits."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            allocation.release()


def _job_here(variables: Mapping[str, str]) -> str:
    """Returns the job whose allocation this process may use; empty in a step of a job."""
    step = variables.get("SLURM_STEP_ID", "")
    is_task = step.isdigit() and variables.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    return "" if is_task else variables.get("SLURM_JOB_ID", "")


def _requeues(variables: Mapping[str, str]) -> int:
    """Returns how often the job of this process has been put back into the queue."""
    count = variables.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0


def _may_requeue(job: str) -> bool:
    """Whether a job can go back into the queue: a batch job that nobody has cancelled."""
    try:
        fields = fields_of(job)
    except LaunchError:
        return False
    return fields.get("BatchFlag") != "0" and fields.get("JobState") != "CANCELLED"


def _nodes(text: str) -> list[str]:
    names = ask("scontrol", "show", "hostnames", _no_option("nodes", text)).split()
    return [_no_option("node", name) for name in names]


def _no_option(what: str, text: str) -> str:
    """Returns a text of SLURM for its commands, unless they would take it for an option.

    Raises:
        ConfigurationError: They would.
    """
    if text.startswith("-"):
        raise ConfigurationError(f"SLURM names the {what} {text!r}, which begins with a dash")
    return text
