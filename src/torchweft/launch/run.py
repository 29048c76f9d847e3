"""Runs one script in several worker processes, as the command ``torchweft run`` does.

Workers of a group of known size meet at a port, where the worker of rank 0 hosts the store. Workers
of an open group meet at a file in a folder of the launcher, which no other user can enter. It lives
as long as the run, whichever worker dies, and nothing listens. See ``GroupFile`` in
``torchweft.engine.worker.rendezvous``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from torchweft import knobs, standard_streams
from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.console import Console
from torchweft.launch.control import Ladder
from torchweft.launch.job import Job
from torchweft.launch.nursery import WARM_MODULES, Nursery, WorkerSource
from torchweft.launch.report import RunReport, shell_status, signal_name
from torchweft.launch.restarts import GROUP, RestartPolicy
from torchweft.launch.signals import watched_signals
from torchweft.launch.supervisor import KILL_LADDER, Supervisor
from torchweft.launch.worker import (
    HeldPort,
    Scrapes,
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

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
INIT_METHOD_VARIABLE = "WEFT_INIT_METHOD"
_OF_CLOSED_GROUPS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Order:
    """What ``torchweft run`` was asked for.

    Attributes:
        names: The workers' names, in order of their ranks.
        job: What each of them does, made by ``torchweft.launch.job``.
        console: Where the workers' output goes, and messages about them.
        restarts: The policy when a worker dies; by default, the others are ended.
        master_port: The port at which the workers meet; 0 for a free port.
        is_warm: Whether workers are forked from a process that has imported torch.
        seed: Makes the random numbers of warm workers reproducible, with different numbers for
            each worker. Without a seed they differ by worker and run. Workers that are not warm
            start like any program.
        arguments: The arguments of ``torchweft``, for a launcher that runs the command elsewhere.
        metrics: Where the workers serve their metrics: those of a host at this port and those that
            follow. None if they do not.
    """

    names: Sequence[str]
    job: Job
    console: Console
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    master_port: int = 0
    is_warm: bool = False
    seed: int | None = None
    arguments: Sequence[str] = ()
    metrics: Address | None = None

    def check(self) -> None:
        """Checks what does not depend on the launcher.

        Raises:
            ConfigurationError: A value is invalid; or a ``WEFT_`` variable is unknown, or cannot
                be read.
        """
        self.restarts.check()
        knobs.check_environment()
        check_seed(self.seed)

    def check_over_hosts(self) -> None:
        """Checks the same for a launcher whose workers may be on several hosts.

        Raises:
            ConfigurationError: A value is invalid, or workers are to be started again one by one.
        """
        self.check()
        if self.restarts.scope != GROUP:
            raise ConfigurationError(
                "--restart worker is for workers of one machine, as their meeting place is a "
                "file of the launcher; over hosts use --restart group"
            )

    @property
    def preload(self) -> Sequence[str]:
        """The modules that the process imports from which workers are forked."""
        return WARM_MODULES if self.is_warm else ()


def run_here(order: Order) -> int:
    """Runs a script in workers of this machine, until all have ended or one has failed for good.

    Call it from the main thread: it handles signals while it runs.

    Returns:
        An exit status as shells report it: that of the worker whose death ended the run, 130
        after Ctrl-C, 0 on success.

    Raises:
        ConfigurationError: The order is invalid; or metrics cannot be served.
    """
    order.check()
    scrapes = None
    if order.metrics is not None:
        scrapes = Scrapes(order.metrics, {name: rank for rank, name in enumerate(order.names)})
        scrapes.check_here()
    environment = compute_environment(os.environ, len(order.names))
    with (
        tempfile.TemporaryDirectory(prefix="weft-run-", ignore_cleanup_errors=True) as notes,
        closing(HeldPort("127.0.0.1")) as held,
    ):
        meeting = _meeting(order, notes, held)
        with Nursery(preload=order.preload, environment=environment) as nursery:
            nursery.remove_at_end(notes)
            run = Run(order, nursery, environment, meeting, notes, scrapes=scrapes)
            if scrapes is not None:
                order.console.announce(f"torchweft run: {scrapes.text()}")
            return run.to_the_end()


class Run:
    """The state of one run: the failure that ended it, and its exit status.

    Args:
        order: What is run.
        nursery: Starts the workers; this closes it at the end.
        environment: Their variables, without those of their identity and meeting place.
        meeting: Where they meet.
        notes: The folder for notes about deaths.
        locals_: Each worker's number among those of its host, and how many these are; by default,
            there is one host.
        scrapes: Where the workers serve their metrics; None if they do not.
    """

    def __init__(
        self,
        order: Order,
        nursery: WorkerSource,
        environment: dict[str, str],
        meeting: Meeting,
        notes: str,
        locals_: Mapping[str, tuple[int, int]] | None = None,
        scrapes: Scrapes | None = None,
    ) -> None:
        names = order.names
        self._order = order
        self._scrapes = scrapes
        self._locals = locals_ or {name: (rank, len(names)) for rank, name in enumerate(names)}
        self._nursery = nursery
        self._ranks = {name: rank for rank, name in enumerate(names)}
        self._notes = notes
        self._base = environment
        self._meeting = meeting
        self._report = RunReport(order.console, order.restarts, names)
        self._supervisor = Supervisor(
            nursery, self._report, self._spec, self._worker_ended, meeting.renew
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
            with watched_signals(self._supervisor.selector, self._signalled):
                self._supervisor.start()
                while not self._supervisor.is_done:
                    self._supervisor.turn()
        except BrokenPipeError:
            return output_closed()
        except LaunchError as error:
            self._report.say(str(error))
            return self._status or 1
        finally:
            self._nursery.close()
            self._supervisor.close()
        self._report.summarize(self._supervisor.restarts)
        if self._failure is not None:
            self._report.say(self._supervisor.failure_report(self._failure))
        return self._status

    def _spec(self, name: str, restarts: int) -> WorkerSpec:
        rank = self._ranks[name]
        local_rank, count = self._locals[name]
        identity = identity_environment(name, rank, count, restarts, local_rank)
        environment = self._meeting.environment(self._base) | identity
        if self._scrapes is not None:
            environment |= self._scrapes.variables(name)
        job = {**self._order.job, "seed": worker_seed(self._order.seed, name)}
        return WorkerSpec(name, rank, job, environment, self._notes)

    def _worker_ended(self, ended: WorkerExit) -> None:
        if ended.exit_code == 0 or self._is_ending or self._supervisor.is_regrouping:
            # It succeeded, or the launcher ended it; or the loss of its host, seen late, did.
            if ended.loss and (self._failure or self._supervisor.is_regrouping):
                self._report.lost_before(ended)
            return
        if self._supervisor.died(ended) is None:
            self._failure = ended
            self._end(shell_status(ended.exit_code), _ladder(signal.SIGTERM))
        elif self._order.restarts.scope == GROUP:
            self._supervisor.stop(_ladder(signal.SIGTERM))

    def _end(self, status: int, ladder: Ladder) -> None:
        if not self._is_ending:
            self._status = status
        self._is_ending = True
        self._supervisor.cancel_restarts()
        self._supervisor.stop(ladder)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGQUIT:
            self._report.say("SIGQUIT, each worker writes what it does to a file")
            self._supervisor.signal(number)
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


# Meeting places


class Meeting(Protocol):
    """A place at which workers find each other."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base``, changed for workers that meet here."""

    def renew(self) -> None:
        """Prepares for a new run."""


class PortMeeting:
    """A port at which the worker with rank 0 hosts the store of a closed group.

    Args:
        world_size: Number of workers in the group.
        port: The port.
        address: Returns the address of its host.
        reserve: Returns another port for each new run; None if the port was given: remnants of a
            group may still hold the former port.
    """

    def __init__(
        self,
        world_size: int,
        port: int,
        address: Callable[[], str] = lambda: "127.0.0.1",
        reserve: Callable[[], int] | None = None,
    ) -> None:
        self._world_size = world_size
        self._port = port
        self._address = address
        self._reserve = reserve

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` with the variables that ``env://`` reads."""
        return {
            **base,
            "WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": self._address(),
            "MASTER_PORT": str(self._port),
        }

    def renew(self) -> None:
        """Takes another port, unless one was given."""
        if self._reserve is not None:
            self._port = self._reserve()


class FileMeeting:
    """A file for an open group, which has no fixed size.

    Args:
        folder: A folder that only this user can enter; the caller removes it after the run.
    """

    def __init__(self, folder: str) -> None:
        self._init_method = f"file://{os.path.join(folder, 'group')}"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` without a size and a port, but with the file.

        A store that the user has named is kept: it may connect workers of several machines.
        """
        environment = {key: value for key, value in base.items() if key not in _OF_CLOSED_GROUPS}
        environment.setdefault(INIT_METHOD_VARIABLE, self._init_method)
        return environment

    def renew(self) -> None:
        """Does nothing: restarted workers rejoin the workers that stayed."""


def _meeting(order: Order, folder: str, held: HeldPort) -> Meeting:
    if order.restarts.scope == GROUP:
        if order.restarts.limit and INIT_METHOD_VARIABLE in os.environ:
            raise ConfigurationError(
                f"a group that is started again meets at a new place, but {INIT_METHOD_VARIABLE} "
                "names one; unset it"
            )
        number = order.master_port
        try:
            port = held.take(number)
        except OSError as error:
            raise ConfigurationError(
                f"port {number} cannot be used ({error.strerror}); "
                "take another one, or leave --master-port away to have a free one chosen"
            ) from None
        return PortMeeting(len(order.names), port, reserve=None if number else held.take)
    if order.master_port:
        raise ConfigurationError(
            "workers that are started again one by one meet at the launcher, not at a port of the "
            "first worker, which may die; leave --master-port away"
        )
    return FileMeeting(folder)
