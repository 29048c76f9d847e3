"""A cluster around the calling program: worker processes that serve it, in a ``with`` block.

The caller is a worker too, rank 0, so it can be called back, own references and take part in
backward passes. The workers meet it through a file in a private directory: no other user of the
machine can reach it, nothing listens on the network, and no port has to be free. (A TCP store
would get a free port as reliably if the caller opened it first. But it listens on all
interfaces, and admits every connection.)

The caller cannot be restarted, so a cluster that restarts workers cannot restart the whole group.
Its group is therefore open: each worker comes back by itself, under its name and rank.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

from torchweft import deaths, knobs
from torchweft.errors import (
    AlreadyInitialized,
    CallTimeout,
    LaunchError,
    NotInitialized,
    RendezvousError,
    RendezvousTimeout,
    SerializationError,
    ShutdownError,
    UnknownWorker,
    WeftError,
    WorkerLost,
)
from torchweft.launch.console import session_console
from torchweft.launch.control import Ladder
from torchweft.launch.job import check_options, serve_job, setup_error
from torchweft.launch.nursery import Nursery, WorkerSource
from torchweft.launch.report import (
    RunReport,
    describe_death,
    describe_duration,
    describe_worker,
)
from torchweft.launch.restarts import WORKER, RestartPolicy
from torchweft.launch.signals import stacks_signal
from torchweft.launch.supervisor import Supervisor
from torchweft.launch.terms import Terms
from torchweft.launch.worker import WorkerExit, WorkerSpec, compute_environment, worker_seed
from torchweft.patching import check_unpatched

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions, WorkerStacks

STOP_LADDER: Ladder = [(signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5)]
STOP_LIMIT_S = 1.5
DUMP_S = 0.5
"""Seconds that workers have to write their stacks."""

WATCH_S = 0.01
"""Seconds between checks in a wait for a worker."""

LOOK_S = 0.1
"""Seconds between checks whether a cluster that restarts workers is closed."""

NOTICE_S = 5.0
"""Seconds by which a worker's end may be known later than the end of its connections."""

PIDS_POLL_S = 0.001
"""Seconds between checks in a wait for process ids."""

PIDS_S = 10.0
"""Seconds by which a worker's process id may be known later than that it has joined."""

SAY_S = 5.0
"""Seconds between reports of the workers that a shutdown waits for."""

ANSWER_S = 4.0
"""Seconds that a worker has to report what it is doing: it may compute, on a busy host."""

_ASKED_AT_ONCE = 32
"""Workers that are asked at the same time what they are doing."""

Lacking = Callable[[], tuple[str, tuple[str, ...]]]
"""Returns what a shutdown lacks, as text, and the names of the workers that it waits for."""

_log = logging.getLogger("torchweft")

when_in_the_way: list[Callable[[], object]] = []
"""Functions that are called before a cluster starts, and may have this process leave its group."""

_left: set[Cluster] = set()
"""Clusters whose group the caller has left, but that are not closed; the next one ends them."""


class Cluster:
    """Worker processes around the calling program; made by ``torchweft.cluster``.

    Without a ``with`` block call ``start`` and ``close``; a cluster that is not closed ends with
    the interpreter.

    Attributes:
        names: The workers' names, in order of their ranks, which begin at 1.
        name: The caller's own name; its rank is 0.

    Raises:
        ConfigurationError: The number of restarts is invalid.
    """

    def __init__(self, terms: Terms) -> None:
        self.names = terms.names
        self.name = terms.name
        self._terms = terms
        self._is_open = terms.restarts != 0
        self._world_size = None if self._is_open else len(self.names) + 1
        self._nursery: WorkerSource | None = None
        self._console = session_console()
        self._policy = RestartPolicy(terms.restarts, WORKER)
        self._policy.check()
        self._report = RunReport(self._console, self._policy, self.names, "weft", has_status=False)
        self._supervisor: Supervisor | None = None
        self._follower: threading.Thread | None = None
        self._directory = ""
        self._environment: dict[str, str] = {}
        self._scrapes = terms.scrapes()
        self._setup: bytes | None = None
        self._owner_pid = os.getpid()
        self._store: object = None
        self._has_failed = threading.Event()
        self._reset()

    def _reset(self) -> None:
        self._is_closing = self._is_stopping = False
        self._has_joined = self._has_left = self._is_bug = False
        self._ended: set[str] = set()
        self._failed: list[WorkerExit] = []
        self._has_failed.clear()
        self._lost_nursery: LaunchError | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers by name; empty before the start."""
        return {} if self._supervisor is None else self._supervisor.pids

    def __repr__(self) -> str:
        if self._supervisor is None:
            return f"<Cluster of {len(self.names)} workers, not running: {', '.join(self.names)}>"
        shown = (
            f"{name} ({'ended' if name in self._ended else f'pid {self.pids.get(name)}'})"
            for name in self.names
        )
        return f"<Cluster of {len(self.names)} workers around {self.name!r}: {', '.join(shown)}>"

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a cluster belongs to the process that started it, and cannot be copied or sent; pass "
            "what the function needs, such as cluster.names"
        )

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def start(self) -> Cluster:
        """Starts the workers and joins them; returns when all have joined.

        Raises:
            AlreadyInitialized: The caller is a worker of another group.
            ConfigurationError: An option cannot be used, or is defined in the main program.
            LaunchError: A worker could not be started, or ended before it had joined; or the
                cluster is running already.
        """
        if self._supervisor is not None:
            raise LaunchError("this cluster is running already; make another one, or close it")
        _check_free()
        for left in list(_left):
            left.abandon()
        if self._terms.options is not None:  # Otherwise torch is loaded later, see _check_free.
            check_options(self._plain_options())
        self._check_scrapes()
        self._reset()
        self._owner_pid = os.getpid()
        self._directory = tempfile.mkdtemp(prefix="weft-cluster-")
        deaths.follow(self._directory)
        try:
            self._start_workers()
            here = "" if self._scrapes is None else str(self._scrapes.address)
            with knobs.METRICS.override(here):
                self._join()
            self._await_pids()
        except BaseException as error:
            failure = self._failure() or self._unfinished_setup(error)
            self.abandon()
            if isinstance(error, RendezvousError) and failure is not None:
                # The rendezvous failed because of the worker's end, or the cause of that end.
                raise failure from failure.__cause__ or error
            raise
        atexit.register(self.abandon)
        return self

    def wait_for(self, name: str, timeout_s: float = 60.0) -> None:
        """Blocks until a worker has joined, such as a restarted worker, and all others know it.

        Args:
            name: The worker's name.
            timeout_s: How long to wait for it, in seconds.

        Raises:
            LaunchError: It will not join any more.
            RendezvousTimeout: It did not join in time.
        """
        from torchweft.launch.cluster_store import is_present

        began_s = time.monotonic()
        notice_s = knobs.WAIT_NOTICE_S.get() or math.inf
        while True:
            left_s = max(began_s + timeout_s - time.monotonic(), WATCH_S)
            if is_present(name, left_s) and name in self.pids:
                return
            failure = self._failure()
            if failure is not None:
                raise failure
            waited_s = time.monotonic() - began_s
            if waited_s >= notice_s:
                notice_s = math.inf
                _log.warning("the cluster has waited %.0f s for worker %r to join", waited_s, name)
            if waited_s > timeout_s:
                raise RendezvousTimeout(
                    f"worker {name!r} did not join within {timeout_s:.1f} s", elapsed_s=timeout_s
                )
            time.sleep(WATCH_S)

    def close(self) -> None:
        """Shuts the group down gracefully and waits until every worker has ended.

        If a worker has failed, the others are ended at once instead.

        Raises:
            LaunchError: A worker has failed, unless ``check`` is off.
            ShutdownError: The shutdown failed.
        """
        if self._supervisor is None:
            return
        try:
            failure = self._failure() or self._leave_gracefully(self._supervisor)
        finally:
            self.abandon()
        if failure is not None and (self._terms.check or isinstance(failure, ShutdownError)):
            raise failure

    def abandon(self) -> None:
        """Ends the workers at once, even while they serve calls; the caller leaves the group."""
        if not self._directory or os.getpid() != self._owner_pid:
            return  # not running; or in a process that the caller has forked
        self._is_closing = self._is_stopping = self._has_left = True
        # End the workers first: if the caller left before, each would report it as lost.
        if self._supervisor is not None:
            self._supervisor.stop(STOP_LADDER)
            self._await_workers(STOP_LIMIT_S)
        if self._has_joined:
            self._has_joined = False
            _leave_at_once()
        self._clean_up()

    # What differs on other hosts

    def _check_scrapes(self) -> None:
        """Checks that all workers can serve their metrics; raises ConfigurationError if not."""
        if self._scrapes is not None:
            self._scrapes.check_here()

    def _make_nursery(self) -> WorkerSource:
        """Returns the nursery, and sets the workers' environment."""
        environment = compute_environment(self._terms.environment(os.environ), len(self.names))
        self._environment = environment
        if self._terms.nursery is not None:
            return self._terms.nursery
        self._nursery = Nursery(environment=environment)
        return self._nursery

    def _environment_of(self, name: str, restarts: int) -> dict[str, str]:
        environment = self._terms.environment_of(name, self._environment, restarts)
        return environment if self._scrapes is None else environment | self._scrapes.variables(name)

    def _rendezvous(self) -> str:
        """Returns where the workers meet, as an init method."""
        return f"file://{self._directory}/rendezvous"

    def _meet(self, options: RpcBackendOptions) -> None:
        """Sets where the caller meets its workers."""
        if self._is_open:
            options.init_method = self._rendezvous()
            return
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from torchweft.launch.cluster_store import ClusterStore

        store = FileStore(self._rendezvous().removeprefix("file://"), len(self.names) + 1)
        options.store = self._store = ClusterStore(store, self._failure)

    # Starting

    def _start_workers(self) -> None:
        nursery = self._make_nursery()
        self._setup = None if self._terms.setup is None else shipped(self._terms.setup)
        nursery.remove_at_end(self._directory)
        self._supervisor = Supervisor(nursery, self._report, self._spec, self._worker_ended)
        self._supervisor.start()
        self._follower = threading.Thread(target=self._follow, name="weft-cluster", daemon=True)
        self._follower.start()

    def _spec(self, name: str, restarts: int) -> WorkerSpec:
        self._ended.discard(name)
        rank = self.names.index(name) + 1
        job = serve_job(
            name,
            rank,
            self._world_size,
            options=self._plain_options(),
            rendezvous=self._rendezvous(),
            seed=worker_seed(self._terms.seed, name),
            setup=self._setup,
            device=self._terms.device_of(name),
            report=self._report_of(name),
        )
        environment = self._environment_of(name, restarts)
        return WorkerSpec(name, rank, job, environment, self._directory)

    def _report_of(self, name: str) -> str:
        return os.path.join(self._directory, f"setup-{name}")

    def _plain_options(self) -> RpcBackendOptions:
        """Returns a copy of the caller's options without init method, store, secret and address."""
        from torchweft.rpc import RpcBackendOptions

        options = (
            RpcBackendOptions() if self._terms.options is None else copy.copy(self._terms.options)
        )
        options.init_method = options.store = None
        # The token is in a private directory: a process that knows it belongs to this user. A
        # secret is not sent to other processes, and no worker comes from another machine.
        options.secret, options.listen = None, "127.0.0.1"
        return options

    def _join(self) -> None:
        from torchweft import extending

        options = self._plain_options()
        options.check()
        self._meet(options)
        deadline_s = time.monotonic() + options.init_timeout
        extending.join_group(self.name, 0, self._world_size, options)
        self._has_joined = True  # from here on there is a group to leave
        extending.on_leave(self._on_left)
        if not self._is_open:
            return
        for name in self.names:
            self.wait_for(name, max(deadline_s - time.monotonic(), 0.0))

    def _on_left(self) -> None:
        """Called when the caller leaves the group, also by ``shutdown()``: its workers may end."""
        self._is_closing, self._has_joined = True, False
        _left.add(self)

    def _await_pids(self) -> None:
        """Waits until all process ids are known: a worker may join before its nursery tells."""
        deadline_s = time.monotonic() + PIDS_S
        while missing := [name for name in self._remaining() if name not in self.pids]:
            if self._failure() is not None:
                return
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"worker {missing[0]!r} has joined, but its nursery has not told its process "
                    f"id within {PIDS_S:g} s; is the nursery's process stopped?",
                    worker=missing[0],
                )
            time.sleep(PIDS_POLL_S)

    def _unfinished_setup(self, error: BaseException) -> LaunchError | None:
        """Returns the error to report if the start timed out because of a worker's setup."""
        if self._setup is None or not isinstance(error, RendezvousTimeout):
            return None
        late = [self.names[rank - 1] for rank in error.missing if rank]
        if not late:
            return None
        self._dump_stacks(late)
        return LaunchError(
            f"worker {late[0]!r} has not joined within {error.elapsed_s:.0f} s, and its setup= is "
            "part of that; make it shorter, or raise init_timeout in rpc_backend_options",
            worker=late[0],
        )

    # Following, in a thread

    def _follow(self) -> None:
        assert self._supervisor is not None
        try:
            self._follow_workers(self._supervisor)
        except LaunchError as error:
            self._lost_nursery = error
            self._has_failed.set()
            if not self._is_closing:
                self._say(str(error))

    def _follow_workers(self, supervisor: Supervisor) -> None:
        if not self._is_open:
            while not supervisor.is_done:
                supervisor.turn()
            return
        while not (self._has_left and supervisor.is_done):
            if self._is_closing:
                supervisor.cancel_restarts()
            supervisor.turn(LOOK_S)

    def _worker_ended(self, ended: WorkerExit) -> None:
        self._ended.add(ended.name)
        expected = (0, -signal.SIGTERM) if self._is_open else (0,)
        if self._is_stopping or (self._is_closing and ended.exit_code in expected):
            return
        assert self._supervisor is not None
        is_reported = os.path.exists(self._report_of(ended.name))  # the caller raises that error
        if self._is_open and not is_reported:
            if self._supervisor.died(ended) is not None:
                return
            self._is_bug = self._supervisor.has_repeated
        self._failed.append(ended)
        self._has_failed.set()
        if not is_reported:
            # Later failures are usually consequences of the first: report each in one line.
            is_first = len(self._failed) == 1
            report = self._supervisor.failure_report(ended) if is_first else describe_death(ended)
            self._say(report)

    def _failure(self) -> LaunchError | None:
        """Returns the error of the first failed worker or the lost nursery, if any."""
        if self._lost_nursery is not None or not self._failed:
            return self._lost_nursery
        first = self._failed[0]
        text, cause = describe_worker(first), setup_error(self._report_of(first.name))
        if cause is not None:
            text = f"the setup of worker {first.name!r} failed: {type(cause).__name__}: {cause}"
        elif self._is_open:
            reason = "it failed twice at once" if self._is_bug else "its restarts are used up"
            text = f"{text}, and is not started again: {reason}"
        error = LaunchError(text, worker=first.name, exit_code=first.exit_code)
        error.__cause__ = cause
        return error

    def _await_workers(self, limit_s: float) -> None:
        if self._follower is not None:
            self._follower.join(limit_s)

    def _remaining(self) -> list[str]:
        return [name for name in self.names if name not in self._ended]

    # Leaving

    def _leave_gracefully(self, supervisor: Supervisor) -> WeftError | None:
        """Shuts the group down and waits for its workers; returns the error, if any."""
        self._is_closing = True
        watch = LeaveWatch(self._say, self._terms.leave_timeout_s)
        problem: WeftError | None = self._leave_group(watch)
        self._has_left = True
        if problem is None:
            if self._is_open:
                supervisor.stop([(signal.SIGTERM, watch.left_s())])
            self._await_ends(watch)
            problem = self._unended(watch)
        # Workers that have ended are the cause, unless they ended because the time was up.
        return (None if watch.left_s() else problem) or self._failure() or problem

    def _leave_group(self, watch: LeaveWatch) -> ShutdownError | None:
        """Leaves the group; returns the error, if any."""
        from torchweft import extending

        if not self._has_joined:
            return None
        limit_s = 0.0 if math.isinf(watch.limit_s) else watch.limit_s
        try:
            extending.leave_group(limit_s, watch.following)
        except ShutdownError as error:
            if watch.stuck:
                return self._stuck(watch)
            self._has_failed.wait(NOTICE_S)  # the connection's end is seen before the exit
            return error
        return None

    def _stuck(self, watch: LeaveWatch) -> ShutdownError:
        """Reports stuck workers, with their stacks, before they are killed; returns the error."""
        names = [name for name in watch.stuck if name not in self._ended]
        silent = [name for name in names if watch.stuck[name] is None]
        for name in names:
            if watch.stuck[name] is not None:
                self._say(f"stuck is {watch.stuck[name]}")
        self._dump_stacks(silent)
        return ShutdownError(
            f"the cluster could not be left within {watch.limit_s:g} s: {_doings_text(watch.stuck)}"
            "; its workers were killed. If they need more time, pass leave_timeout= to cluster()",
            missing=tuple(names),
        )

    def _dump_stacks(self, names: Sequence[str]) -> None:
        """Signals workers that do not answer otherwise to write their stacks to standard error."""
        number = stacks_signal()
        if number is None or not names or self._supervisor is None:
            return
        self._say(f"the stacks of {', '.join(map(repr, names))}:")
        for name in names:
            self._supervisor.signal(number, name)
        self._await_workers(DUMP_S)

    def _await_ends(self, watch: LeaveWatch) -> None:
        """Waits until the workers' processes have ended, or the time is up."""
        while self._remaining() and watch.left_s():
            self._await_workers(min(SAY_S, watch.left_s()))
            if (remaining := self._remaining()) and watch.left_s():
                watch.say_waiting(
                    f"worker {remaining[0]!r} has left the group, but its process has not ended"
                )

    def _unended(self, watch: LeaveWatch) -> LaunchError | None:
        remaining = self._remaining()
        if not remaining:
            return None
        self._dump_stacks(remaining)
        return LaunchError(
            f"worker {remaining[0]!r} did not end within {watch.limit_s:g} s of the shutdown "
            "and was killed; does an exit handler or a thread of its own wait?",
            worker=remaining[0],
        )

    def _say(self, text: str) -> None:
        self._console.announce(f"weft: {text}")

    def _clean_up(self) -> None:
        atexit.unregister(self.abandon)
        _left.discard(self)
        if self._nursery is not None:
            self._nursery.end()
        if self._follower is not None:
            self._follower.join()
        if self._nursery is not None:
            self._nursery.close()
        if self._supervisor is not None:
            self._supervisor.close()
        deaths.follow("")
        shutil.rmtree(self._directory, ignore_errors=True)
        self._supervisor = self._follower = self._nursery = self._store = None
        self._directory = ""


class LeaveWatch:
    """Follows the shutdown of a group from one of its workers.

    Args:
        say: Writes one message of the launcher.
        limit_s: How long leaving may take, in seconds.

    Attributes:
        deadline_s: When the time is up, by ``time.monotonic``.
        stuck: After a shutdown that ran out of time: the activity of each unfinished worker, by
            name; None for a worker that did not report it.
    """

    def __init__(self, say: Callable[[str], None], limit_s: float) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self.limit_s = limit_s
        self.deadline_s = self._began_s + limit_s
        self.stuck: dict[str, WorkerStacks | None] = {}

    @contextlib.contextmanager
    def following(self, lacking: Lacking) -> Iterator[None]:
        """Reports at intervals, within the ``with`` block, the workers that it waits for."""
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._say_again, args=(is_over, lacking), name="weft-cluster-leaving"
        )
        thread.start()
        try:
            yield
            if time.monotonic() >= self.deadline_s:
                self.stuck = _doings(lacking()[1])
        finally:
            is_over.set()
            thread.join()

    def left_s(self) -> float:
        """Returns the time left, in seconds."""
        return max(self.deadline_s - time.monotonic(), 0.0)

    def say_waiting(self, for_whom: str) -> None:
        """Reports what leaving waits for, and how long it has waited."""
        waited_s = time.monotonic() - self._began_s
        self._say(f"still leaving the cluster after {describe_duration(waited_s)}: {for_whom}")

    def _say_again(self, is_over: threading.Event, lacking: Lacking) -> None:
        while not is_over.wait(SAY_S):
            text, workers = lacking()
            doings = _doings(workers)
            if is_over.is_set():
                return
            self.say_waiting(_doings_text(doings) or text)


def _doings(awaited: Sequence[str]) -> dict[str, WorkerStacks | None]:
    """Returns what the workers are doing that hold up the shutdown.

    An awaited worker that answers and serves no call only waits for another worker, so it is not
    to blame. If no awaited worker is to blame, all workers are asked.
    """
    from torchweft import extending

    told: dict[str, WorkerStacks | None] = {}
    for names in (awaited, [each.name for each in extending.present_workers()]):
        told |= _asked([name for name in names if name not in told])
        to_blame = {name: doing for name, doing in told.items() if doing is None or doing.calls}
        if to_blame:
            return to_blame
    return {name: told[name] for name in awaited}


def _asked(names: Sequence[str]) -> dict[str, WorkerStacks | None]:
    """Asks workers at the same time what they are doing; None for those that do not answer."""
    from torchweft import rpc

    def asked(name: str) -> WorkerStacks | None:
        try:
            return rpc.stacks(name, ANSWER_S)
        except (CallTimeout, NotInitialized, UnknownWorker, WorkerLost):
            return None

    with ThreadPoolExecutor(_ASKED_AT_ONCE, "weft-cluster-asking") as pool:
        return dict(zip(names, pool.map(asked, names), strict=True))


def _doings_text(doings: dict[str, WorkerStacks | None]) -> str:
    return "; ".join(_doing_text(name, doing) for name, doing in doings.items())


def _doing_text(name: str, doing: WorkerStacks | None) -> str:
    if doing is None:
        return f"worker {name!r} does not say what it is doing"
    if not doing.calls:
        return f"worker {name!r} has not finished"
    return f"worker {name!r} runs {' and '.join(map(str, doing.calls))}"


def shipped(function: Callable[[], object]) -> bytes:
    """Returns a function as bytes, for another process.

    Raises:
        SerializationError: It cannot be serialized.
    """
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:
        raise SerializationError(
            f"setup cannot be sent to the workers: {error}; a function at the top of a module can"
        ) from error


def _leave_at_once() -> None:
    from torchweft import rpc

    with contextlib.suppress(Exception):  # report the reason for leaving, not its consequences
        rpc.shutdown(graceful=False)


def _check_free() -> None:
    """Raises AlreadyInitialized where this process is a worker, which no cluster can be around."""
    check_unpatched()
    for make_way in when_in_the_way:
        make_way()
    # Not imported here: the caller loads torch while the workers do, not before them.
    if "torchweft.rpc" not in sys.modules:
        return
    from torchweft import extending

    if extending.is_worker():
        raise AlreadyInitialized(
            f"RPC is already initialized: this process is worker {extending.this_worker().name!r}; "
            "call torchweft.shutdown() before it starts a cluster"
        )
