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
import contextlib
import math
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.console import Console, Sink, binary_sink, session_console
from torchweft.launch.control import READ_BYTES
from torchweft.launch.hosts import Host, HostNurseries
from torchweft.launch.hosts_launcher import HostsLauncher
from torchweft.launch.report import signal_name
from torchweft.launch.run import Order, Run, output_closed
from torchweft.launch.signals import watched_signals

if TYPE_CHECKING:
    from torchweft.launch.clusters import Cluster
    from torchweft.launch.terms import Terms

POLL_S = 0.5
"""Seconds between looks at the output files, or at the answer to a request for an allocation."""
ASK_S = 2.0
"""Seconds between questions to SLURM, whose controller serves all users."""
_ASK_SELDOM_S = 10.0
"""Seconds between questions about a job that waits in the queue."""
_ANSWER_S = 60.0
TIMEOUT_S = 3600.0
"""Seconds in the queue, within which a cluster must have its allocation."""
_ASK_LIMIT_S = 30.0
_SUBMIT_LIMIT_S = 120.0
_CANCEL_S = 15.0
_RELEASE_S = 15.0
_COMMANDS = ("sbatch", "srun", "salloc", "scontrol", "scancel")
_FIELD = re.compile(r"(\w+)=(\S*)")
_ALLOCATED = re.compile(r"job allocation (\d+)")
_ENDED = frozenset(
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL "
    "OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED".split()
)

# The command in the allocation ends with its input, so with this process.
_TELL = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'


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
        add = parser.add_argument
        add("--nodes", type=int, metavar="N", help="how many nodes (default: 1)")
        add("--workers-per-node", type=int, default=1, metavar="N", help="workers on each node")
        add("--slurm-options", default="", metavar="TEXT", help="further options of sbatch")
        add("--python", default=sys.executable, metavar="PATH", help="the interpreter there")

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
    names = [text]
    if not text.startswith("-"):
        names = ask("scontrol", "show", "hostnames", text).split()
    for each in names:
        if each.startswith("-"):  # SLURM's commands would take it for an option
            raise ConfigurationError(f"SLURM names a node {each!r}, which begins with a dash")
    return names


# Questions to SLURM


def ask(*command: str, text: str = "", limit_s: float | None = None) -> str:
    """Runs a command of SLURM and returns what it prints.

    Args:
        command: The command and its arguments.
        text: Its standard input.
        limit_s: Seconds within which it must answer; by default, 30.

    Raises:
        LaunchError: It fails, or is not installed; says what it said.
    """
    limit_s = _ASK_LIMIT_S if limit_s is None else limit_s
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except OSError as error:
        raise LaunchError(f"'{command[0]}', a command of SLURM, cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command[0]} has not answered within {limit_s:g} s; 'scontrol ping' tells whether "
            "SLURM's controller is up, and 'squeue --me' which jobs it has"
        ) from None
    if done.returncode:
        what = "the job" if command[0] == "sbatch" else f"'{command[0]}'"
        raise LaunchError(
            f"SLURM refuses {what}: {_on_one_line(done.stderr)}", exit_code=done.returncode
        )
    return done.stdout


def fields_of(job: str) -> dict[str, str]:
    """Returns what SLURM knows of a job."""
    return dict(_FIELD.findall(ask("scontrol", "--oneliner", "show", "job", job)))


def state_of(job: str) -> str:
    """Returns the state of a job; empty if SLURM does not answer."""
    try:
        return fields_of(job).get("JobState", "")
    except LaunchError:
        return ""


def _on_one_line(text: str) -> str:
    return " / ".join(filter(None, map(str.strip, text.split("\n"))))


class BatchJob:
    """A batch job: submitted, followed by its output files, and cancelled.

    Args:
        number: Its number.
        out: The file of its standard output.
        err: The file of its standard error.
    """

    def __init__(self, number: str, out: Path, err: Path) -> None:
        self.number = number
        self._tails = (_Tail(out, binary_sink("stdout")), _Tail(err, binary_sink("stderr")))
        self._signals = 0
        self._cancelled_s: float | None = None
        self._status = 0

    @classmethod
    def submit(cls, script: str, options: Sequence[str]) -> BatchJob:
        """Submits a script; its output goes to files in the current folder.

        Raises:
            LaunchError: SLURM refuses it.
        """
        answer = ask(
            *("sbatch", "--parsable", "--requeue", "--open-mode=append", "--job-name=torchweft"),
            *("--output=torchweft-%j.out", "--error=torchweft-%j.err", *options),
            text=script,
            limit_s=_SUBMIT_LIMIT_S,
        )
        number = answer.strip().partition(";")[0]
        return cls(number, *(Path(f"torchweft-{number}.{end}").resolve() for end in ("out", "err")))

    def follow(self, console: Console) -> int:
        """Shows the job's output until the job has ended; returns its exit status.

        Ctrl-C, or another signal that asks this process to end, cancels the job. Call it from the
        main thread.
        """
        console.announce(
            f"torchweft run: submitted SLURM job {self.number}; its output is also in "
            f"{self._tails[0].path}"
        )
        with (
            selectors.DefaultSelector() as selector,
            watched_signals(selector, lambda number: self._cancel(number, console)),
        ):
            try:
                return self._to_the_end(selector, console)
            except BaseException as error:
                with contextlib.suppress(LaunchError):  # nobody would follow the job
                    ask("scancel", self.number)
                if isinstance(error, BrokenPipeError):
                    return output_closed()
                raise
            finally:
                for tail in self._tails:
                    tail.close()

    def _to_the_end(self, selector: selectors.BaseSelector, console: Console) -> int:
        state, asked_s = "", 0.0
        while True:
            for event, _ in selector.select(POLL_S):
                event.data()
            is_done = False
            if time.monotonic() - asked_s >= ASK_S:
                fields, former = self._fields(state), state
                state, asked_s = fields["JobState"], time.monotonic()
                if state == "PENDING" and former != state:
                    reason = fields.get("Reason", "")
                    console.announce(f"torchweft run: job {self.number} waits ({reason})")
                is_done = state in _ENDED
            for tail in self._tails:
                tail.show()
            if is_done:
                return self._end(state, fields, console)
            if self._cancelled_s is not None and time.monotonic() > self._cancelled_s:
                self._cancelled_s = None
                with contextlib.suppress(LaunchError):  # it has just ended
                    ask("scancel", self.number)

    def _fields(self, state: str) -> dict[str, str]:
        """Returns what SLURM knows of the job; its former state while SLURM does not answer."""
        try:
            return {"JobState": state, **fields_of(self.number)}
        except LaunchError as error:
            if "Invalid job id" in str(error):
                raise
            return {"JobState": state}

    def _end(self, state: str, fields: dict[str, str], console: Console) -> int:
        code, _, number = fields.get("ExitCode", "0:0").partition(":")
        status = int(code) or (128 + int(number) if int(number) else 0)
        if state not in ("COMPLETED", "FAILED"):
            console.announce(f"torchweft run: SLURM job {self.number} ended as {state}")
            status = status or 1
        return self._status or status

    def _cancel(self, number: int, console: Console) -> None:
        """Has the job's own launcher end the workers; a second time, or later, cancels the job."""
        self._signals += 1
        self._status = 128 + number
        console.announce(
            f"torchweft run: {signal_name(number)}, cancelling SLURM job {self.number}"
        )
        with contextlib.suppress(LaunchError):  # it has just ended
            if self._signals == 1 and state_of(self.number) == "RUNNING":
                ask("scancel", "--batch", "--signal=INT", self.number)
                self._cancelled_s = time.monotonic() + _CANCEL_S
            else:
                ask("scancel", self.number)


class _Tail:
    """Shows what is appended to a file."""

    def __init__(self, path: Path, sink: Sink) -> None:
        self.path = path
        self._sink = sink
        self._descriptor: int | None = None

    def show(self) -> None:
        if self._descriptor is None:
            with contextlib.suppress(FileNotFoundError):  # the job has not begun
                self._descriptor = os.open(self.path, os.O_RDONLY)
        while self._descriptor is not None and (data := os.read(self._descriptor, READ_BYTES)):
            self._sink.write(data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Allocation:
    """An allocation for the time of one cluster, by ``salloc``; it ends with this process.

    Args:
        requirements: Options of ``salloc``.
    """

    def __init__(self, requirements: Sequence[str]) -> None:
        self._is_granted = False
        self._said = ""
        self._salloc: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["salloc", "--job-name=torchweft", *requirements, "sh", "-c", _TELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this process, which gives it back
        )

    def wait(self, limit_s: float, say: Callable[[str], None]) -> tuple[str, str]:
        """Blocks until SLURM grants the allocation; returns the number of the job and its nodes.

        Args:
            limit_s: How long to wait, in seconds.
            say: Is told that the job waits in the queue, and why.

        Raises:
            LaunchError: SLURM refuses the allocation, or does not grant it in time.
        """
        salloc = self._salloc
        assert salloc is not None
        begin_s = time.monotonic()
        told, reason, next_s = b"", "", begin_s + ASK_S  # an idle cluster grants sooner
        with selectors.DefaultSelector() as selector:
            for stream in (salloc.stdout, salloc.stderr):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ)
            while b"\n" not in told:
                for key, _ in selector.select(POLL_S):
                    data = os.read(key.fd, READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is salloc.stdout:
                        told += data
                    else:
                        self._said += data.decode(errors="replace")
                if not selector.get_map():
                    raise LaunchError(f"SLURM refuses the allocation: {_on_one_line(self._said)}")
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + _ASK_SELDOM_S
                    reason = self._tell_reason(reason, say)
                if time.monotonic() - begin_s > limit_s:
                    raise LaunchError(
                        f"SLURM has not granted the allocation within {limit_s:g} s "
                        f"({reason or _on_one_line(self._said)}); ask for less, for another "
                        "partition (options=), or wait longer (timeout=)"
                    )
        self._is_granted = True
        job, _, nodes = told.decode().strip().partition(" ")
        return job, nodes

    def _tell_reason(self, former: str, say: Callable[[str], None]) -> str:
        """Tells why the job waits in the queue, unless it was told; returns the reason."""
        found = _ALLOCATED.search(self._said)
        if found is None:
            return former
        with contextlib.suppress(LaunchError):  # the controller is busy, or the job has begun
            fields = fields_of(found[1])
            reason = fields.get("Reason", "")
            if fields.get("JobState") == "PENDING" and reason not in (former, "None", ""):
                say(f"SLURM job {found[1]} waits in the queue ({reason}); Ctrl-C leaves it")
                return reason
        return former

    def release(self) -> None:
        """Gives the allocation back, or leaves the queue; waits until that is done. Idempotent."""
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
