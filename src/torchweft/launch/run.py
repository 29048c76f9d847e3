"""Runs one script in several worker processes, as the command ``torchweft run`` does."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from torchweft import knobs, standard_streams
from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.console import Console
from torchweft.launch.control import Ladder
from torchweft.launch.job import Job
from torchweft.launch.meeting import INIT_METHOD_VARIABLE, FileMeeting, Meeting, PortMeeting
from torchweft.launch.nursery import WARM_MODULES, Nursery, WorkerSource
from torchweft.launch.report import Repeats, RunReport, shell_status, signal_name
from torchweft.launch.restarts import GROUP, RestartPlan, RestartPolicy
from torchweft.launch.scrapes import Scrapes
from torchweft.launch.signals import watched_signals
from torchweft.launch.supervisor import KILL_LADDER, Supervisor
from torchweft.launch.worker import (
    WorkerExit,
    WorkerSpec,
    check_seed,
    compute_environment,
    identity_environment,
    worker_seed,
)
from torchweft.scraping import Address

INTERRUPT_LADDER: Ladder = [(signal.SIGINT, 1.0), (signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5)]
"""After Ctrl-C a worker may clean up, but the user gets the prompt back soon."""

LOOK_S = 0.2
"""Seconds between checks whether a lost host has been replaced."""

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE


def run_workers(
    names: Sequence[str],
    job: Job,
    *,
    console: Console,
    master_port: int = 0,
    is_warm: bool = False,
    restarts: RestartPolicy | None = None,
    seed: int | None = None,
    metrics: Address | None = None,
) -> int:
    """Runs ``job`` in one worker for each name, until all have ended or one has failed for good.

    Call it from the main thread: it handles signals while it runs.

    Args:
        names: The workers' names, in order of their ranks.
        job: What each of them does.
        console: Where the workers' output goes, and messages about them.
        master_port: The port at which the workers meet; 0 for a free port.
        is_warm: Whether workers are forked from a process that has imported torch.
        restarts: The policy when a worker dies; by default, the others are ended.
        seed: Makes the random numbers of warm workers reproducible, with different numbers for
            each worker. Without a seed they differ by worker and run. Workers that are not warm
            start like any program.
        metrics: Where the workers serve their metrics: the first at this port, the others at those
            that follow. None if they do not.

    Returns:
        An exit status as shells report it: that of the worker whose death ended the run, 130
        after Ctrl-C, 0 on success.

    Raises:
        ConfigurationError: An argument is invalid; or a ``WEFT_`` variable is unknown, or cannot
            be read; or metrics cannot be served.
    """
    policy = RestartPolicy() if restarts is None else restarts
    policy.check()
    knobs.check_environment()
    check_seed(seed)
    scrapes = _scrapes_here(names, metrics)
    environment = compute_environment(os.environ, len(names))
    preload = WARM_MODULES if is_warm else ()
    with (
        tempfile.TemporaryDirectory(prefix="weft-run-", ignore_cleanup_errors=True) as notes,
        closing(_meeting(len(names), master_port, policy, notes)) as meeting,
        Nursery(preload=preload, environment=environment) as nursery,
    ):
        nursery.remove_at_end(notes)
        run = Run(
            nursery, console, names, job, environment, meeting, policy, seed, notes, scrapes=scrapes
        )
        if scrapes is not None:
            console.announce(f"torchweft run: {scrapes.text()}")
        return run.to_the_end()


def _scrapes_here(names: Sequence[str], metrics: Address | None) -> Scrapes | None:
    if metrics is None:
        return None
    scrapes = Scrapes(metrics, {name: rank for rank, name in enumerate(names)})
    scrapes.check_here()
    return scrapes


def _meeting(count: int, master_port: int, policy: RestartPolicy, folder: str) -> Meeting:
    if policy.scope == GROUP:
        if policy.limit and INIT_METHOD_VARIABLE in os.environ:
            raise ConfigurationError(
                f"a group that is started again meets at a new place, but {INIT_METHOD_VARIABLE} "
                "names one; unset it"
            )
        return PortMeeting(count, master_port)
    if master_port:
        raise ConfigurationError(
            "workers that are started again one by one meet at the launcher, not at a port of the "
            "first worker, which may die; leave --master-port away"
        )
    return FileMeeting(folder)


class Run:
    """The state of one run: pending restarts, the failure that ended it, and its exit status.

    Args:
        nursery: Starts the workers; this closes it at the end.
        console: Where the workers' output goes, and messages about them.
        names: The workers' names, in order of their ranks.
        job: What each of them does.
        environment: Their variables, without those of their identity and meeting place.
        meeting: Where they meet.
        policy: The policy when a worker dies.
        seed: The seed of the run, or None.
        notes: The folder for notes about deaths.
        locals_: Each worker's number among those of its host, and how many these are; by default,
            there is one host.
        scrapes: Where the workers serve their metrics; None if they do not.
    """

    def __init__(
        self,
        nursery: WorkerSource,
        console: Console,
        names: Sequence[str],
        job: Job,
        environment: dict[str, str],
        meeting: Meeting,
        policy: RestartPolicy,
        seed: int | None,
        notes: str,
        locals_: Mapping[str, tuple[int, int]] | None = None,
        scrapes: Scrapes | None = None,
    ) -> None:
        self._scrapes = scrapes
        self._locals = locals_ or {name: (rank, len(names)) for rank, name in enumerate(names)}
        self._nursery = nursery
        self._ranks = {name: rank for rank, name in enumerate(names)}
        self._job = job
        self._seed = seed
        self._notes = notes
        self._base = environment
        self._meeting = meeting
        self._plan = RestartPlan(policy, names, time.monotonic())
        self._repeats = Repeats(self._plan.is_of_group)
        self._report = RunReport(console, policy, names)
        workers = [self._spec(name) for name in names]
        self._supervisor = Supervisor(
            nursery, console, workers, self._worker_ended, self._report.started
        )
        self._status = 0
        self._is_ending = False
        self._failure: WorkerExit | None = None
        self._signal_count = 0
        self.on_terminate: Callable[[], bool] = lambda: False
        """Called for ``SIGTERM``; returns whether the workers may go on for now."""

    def to_the_end(self) -> int:
        """Follows the workers until the run is over, and returns its exit status."""
        try:
            with watched_signals(self._supervisor.watch, self._signalled):
                self._supervisor.start()
                while not self._supervisor.is_done or self._plan.is_waiting:
                    self._supervisor.poll(self._wait_s())
                    self._start_again()
        except BrokenPipeError:
            return output_closed()
        except LaunchError as error:
            self._report.say(str(error))
            return self._status or 1
        finally:
            self._nursery.close()
            self._supervisor.close()
        self._report.summarize(self._plan.total())
        if self._failure is not None:
            self._report.say(self._supervisor.failure_report(self._failure))
        return self._status

    def _spec(self, name: str) -> WorkerSpec:
        rank = self._ranks[name]
        local_rank, count = self._locals[name]
        identity = identity_environment(name, rank, count, self._plan.count(name), local_rank)
        environment = self._meeting.environment(self._base) | identity
        if self._scrapes is not None:
            environment |= self._scrapes.variables(name)
        job = {**self._job, "seed": worker_seed(self._seed, name)}
        return WorkerSpec(name, rank, job, environment, self._notes)

    def _wait_s(self) -> float | None:
        wait_s = self._plan.wait_s(time.monotonic())
        return wait_s if wait_s is None or self._supervisor.can_start() else max(wait_s, LOOK_S)

    def _start_again(self) -> None:
        """Restarts the workers that are due, if their hosts are there."""
        if self._plan.is_regrouping and self._supervisor.is_done:
            attempt = self._plan.all_ended(time.monotonic())
            assert attempt is not None
            self._report.group_waits(attempt)
        if not (self._plan.is_waiting and self._supervisor.can_start()):
            return
        due = self._plan.take_due(time.monotonic())
        if due and self._plan.is_of_group:
            self._meeting.renew()
        for name in due:
            self._supervisor.start_again(self._spec(name))

    def _worker_ended(self, ended: WorkerExit) -> None:
        if ended.exit_code == 0 or self._is_ending or self._plan.is_regrouping:
            # It succeeded, or the launcher ended it; or the loss of its host, seen late, did.
            if ended.loss and (self._failure or self._plan.is_regrouping):
                self._report.lost_before(ended)
            return
        is_repeated = self._repeats.is_repeated(ended, self._supervisor.tail(ended.name))
        attempt = None if is_repeated else self._plan.died(ended.name, time.monotonic())
        others = self._supervisor.running_count
        self._report.died(ended, attempt, others, is_repeated=is_repeated)
        if attempt is None:
            self._failure = ended
            self._end(shell_status(ended.exit_code), _ladder(signal.SIGTERM))
        elif self._plan.is_of_group:
            self._supervisor.stop(_ladder(signal.SIGTERM))

    def _end(self, status: int, ladder: Ladder) -> None:
        if not self._is_ending:
            self._status = status
        self._is_ending = True
        self._plan.cancel()
        self._supervisor.stop(ladder)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGQUIT:
            self._report.say("SIGQUIT, each worker writes what it does to a file")
            self._supervisor.signal_workers(number)
            return
        if number == signal.SIGTERM and self.on_terminate():
            return
        self._signal_count += 1
        is_repeated = self._signal_count > 1
        what = "killing the workers" if is_repeated else "ending the workers"
        if not self._supervisor.running_count:
            what = "no worker runs, and none is started again"
        self._report.say(f"{signal_name(number)}, {what}")
        if is_repeated:
            self._end(128 + number, KILL_LADDER)
        else:
            ladder = INTERRUPT_LADDER if number == signal.SIGINT else _ladder(number)
            self._end(128 + number, ladder)


def output_closed() -> int:
    """Lets this process end quietly, like a program whose output goes to ``head``.

    Returns:
        The exit status of such a program.
    """
    standard_streams.drop_output()
    return BROKEN_PIPE_STATUS


def _ladder(number: int) -> Ladder:
    return [(number, knobs.LAUNCH_GRACE_S.get()), (signal.SIGKILL, 0.5)]
