"""A cluster around the calling program: worker processes that serve it, in a ``with`` block.

The caller is a worker too, rank 0, so it can be called back, own references and take part in
backward passes. The workers meet it through a file in a private directory: nobody else on the
machine can reach it, nothing listens on the network, and no port has to be free. (A TCP store
would have a free port as surely, if the caller opened it first; but it listens on all
interfaces, and lets anybody in who comes.)
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from weft.errors import (
    ConfigurationError,
    LaunchError,
    RendezvousError,
    RendezvousTimeout,
    ShutdownError,
    WeftError,
)
from weft.launch.console import session_console
from weft.launch.control import Ladder
from weft.launch.job import serve_job
from weft.launch.nursery import Nursery
from weft.launch.report import describe_death, describe_worker, failure_report
from weft.launch.supervisor import Supervisor
from weft.launch.worker import WorkerExit, WorkerSpec, compute_environment, worker_names

if TYPE_CHECKING:
    from weft.launch.cluster_store import ClusterStore
    from weft.rpc import RpcBackendOptions

STOP_LADDER: Ladder = [(signal.SIGTERM, 0.5), (signal.SIGKILL, 0.5)]
STOP_LIMIT_S = 1.5
LEAVE_LIMIT_S = 30.0
"""How long workers may take to end after a graceful shutdown."""

WATCH_S = 0.01
"""How often a wait for a worker looks for it."""

NOTICE_S = 0.5
"""How much later than the end of its connections the end of a worker may be known."""


def cluster(
    workers: int | None = None,
    *,
    names: Sequence[str] | None = None,
    name: str = "driver",
    rpc_backend_options: RpcBackendOptions | None = None,
    nursery: Nursery | None = None,
    check: bool = True,
    restarts: int = 0,
) -> Cluster:
    """Makes worker processes that serve the calling program within a ``with`` block.

    The caller joins the group as well, with rank 0; the workers have the ranks from 1. Usable in
    a script, a notebook or at the interactive prompt, any number of times, one after the other::

        with weft.cluster(workers=3) as cluster:
            print(weft.rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1)))

    Leaving the block shuts the group down gracefully: everybody's outstanding work is finished
    first. When the block raises, the workers are ended at once instead.

    Args:
        workers: How many workers; by default as many as ``names``.
        names: Their names; by default ``worker0``, ``worker1``, and so on.
        name: The caller's own name.
        rpc_backend_options: Options for every worker and the caller; the init method is replaced,
            and so are secret and address: nobody of another user or machine is let in.
        nursery: A warm process to fork from; by default one is made, and ended with the cluster.
        check: Whether leaving the block raises if a worker ended within it.
        restarts: How often each worker that dies is started again, within the time and after the
            waits of ``RestartPolicy``. The group is an open one then: calls to a worker that died
            fail, what it owned is lost, and ``Cluster.wait_for`` waits for its next life.

    Raises:
        ConfigurationError: The names, or the number of workers or restarts, cannot be used.
    """
    if workers is None and names is None:
        raise ConfigurationError("say how many workers to start, for instance cluster(workers=2)")
    count = len(names or ()) if workers is None else workers
    checked = worker_names(count, names)
    if name in checked:
        raise ConfigurationError(
            f"{name!r} names both the caller and a worker; choose another with name="
        )
    if restarts:
        # It builds on what is below.
        from weft.launch.restarting_cluster import RestartingCluster

        return RestartingCluster(checked, name, rpc_backend_options, nursery, check, restarts)
    return Cluster(checked, name, rpc_backend_options, nursery, check)


class Cluster:
    """Worker processes around the calling program; made by ``weft.cluster``.

    Without a ``with`` block call ``start`` and ``close``; what is not closed ends with the
    interpreter.

    Attributes:
        names: The workers' names, in order of their ranks, which begin at 1.
        name: The caller's own name; its rank is 0.
    """

    def __init__(
        self,
        names: list[str],
        name: str,
        options: RpcBackendOptions | None,
        nursery: Nursery | None,
        check: bool,
    ) -> None:
        self.names = names
        self.name = name
        self._options = options
        self._shared_nursery = nursery
        self._nursery: Nursery | None = None
        self._check = check
        self._console = session_console()
        self._supervisor: Supervisor | None = None
        self._follower: threading.Thread | None = None
        self._directory = ""
        self._environment: dict[str, str] = {}
        self._owner_pid = os.getpid()
        self._store: ClusterStore | None = None
        self._is_closing = False
        self._is_stopping = False
        self._has_joined = False
        self._ended: set[str] = set()
        self._failed: list[WorkerExit] = []
        self._has_failed = threading.Event()
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

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def start(self) -> Cluster:
        """Starts the workers and joins them; returns when all have joined.

        Raises:
            AlreadyInitialized: The caller is a worker of another group.
            LaunchError: A worker could not be started, or ended before it had joined; or the
                cluster is running already.
        """
        if self._supervisor is not None:
            raise LaunchError("this cluster is running already; make another one, or close it")
        _check_unset()
        self._is_closing = self._is_stopping = self._has_joined = False
        self._ended, self._failed, self._lost_nursery = set(), [], None
        self._has_failed.clear()
        self._owner_pid = os.getpid()
        self._directory = tempfile.mkdtemp(prefix="weft-cluster-")
        try:
            self._start_workers()
            self._join()
        except BaseException as error:
            failure = self._failure()
            self.abandon()
            if isinstance(error, RendezvousError) and failure is not None:
                raise failure from error  # the worker's end led to the failed rendezvous
            raise
        self._has_joined = True
        atexit.register(self.abandon)
        return self

    def wait_for(self, name: str, timeout_s: float = 60.0) -> None:
        """Blocks until a worker is there, such as one that is started again.

        Args:
            name: The worker's name.
            timeout_s: How long to wait for it, in seconds.

        Raises:
            LaunchError: It is not coming any more.
            RendezvousTimeout: It did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not _is_there(name):
            failure = self._failure()
            if failure is not None:
                raise failure
            if time.monotonic() > deadline_s:
                raise RendezvousTimeout(
                    f"worker {name!r} did not join within {timeout_s:.1f} s", elapsed_s=timeout_s
                )
            time.sleep(WATCH_S)

    def close(self) -> None:
        """Shuts the group down gracefully and waits until every worker has ended.

        Where a worker has failed, the others are ended at once instead.

        Raises:
            LaunchError: A worker has failed, unless ``check`` is off.
            ShutdownError: The shutdown did not end well.
        """
        if self._supervisor is None:
            return
        try:
            failure = self._failure() or self._leave_gracefully()
        finally:
            self.abandon()
        if failure is not None and (self._check or isinstance(failure, ShutdownError)):
            raise failure

    def abandon(self) -> None:
        """Ends the workers at once, whatever they do; the caller leaves the group."""
        if not self._directory or os.getpid() != self._owner_pid:
            return  # not running; or in a process that the caller has forked
        self._is_closing = self._is_stopping = True
        # The workers first: were the caller to leave before, each would tell that it is lost.
        if self._supervisor is not None:
            self._supervisor.stop(STOP_LADDER)
            self._await_workers(STOP_LIMIT_S)
        if self._has_joined:
            self._has_joined = False
            _leave_group()
        self._clean_up()

    def _leave_gracefully(self) -> WeftError | None:
        """Shuts the group down and waits for its workers; returns what went wrong."""
        from weft import rpc

        self._is_closing = True
        try:
            rpc.shutdown()
        except ShutdownError as error:
            self._has_failed.wait(NOTICE_S)  # the end of a connection is seen a bit earlier
            return self._failure() or error
        self._await_workers(LEAVE_LIMIT_S)
        if remaining := [name for name in self.names if name not in self._ended]:
            return LaunchError(
                f"worker {remaining[0]!r} did not end within {LEAVE_LIMIT_S:.0f} s of the shutdown "
                "and was killed; does an exit handler or a thread of its own wait?",
                worker=remaining[0],
            )
        return self._failure()

    def _start_workers(self) -> None:
        environment = compute_environment(os.environ, len(self.names))
        if self._shared_nursery is None:
            self._nursery = Nursery(environment=environment)
        self._environment = environment
        workers = [self._spec(name) for name in self.names]
        nursery = self._shared_nursery or self._nursery
        assert nursery is not None
        nursery.remove_at_end(self._directory)
        self._supervisor = Supervisor(
            nursery, self._console, workers, self._worker_ended, self._worker_started
        )
        self._supervisor.start()
        self._follower = threading.Thread(target=self._follow, name="weft-cluster", daemon=True)
        self._follower.start()

    def _spec(self, name: str, restarts: int = 0) -> WorkerSpec:
        rank = self.names.index(name) + 1
        counted = {"WEFT_RESTART_COUNT": str(restarts)}
        return WorkerSpec(name, rank, self._job(name, rank), self._environment | counted)

    def _job(self, name: str, rank: int) -> dict[str, object]:
        return serve_job(
            name,
            rank,
            len(self.names) + 1,
            options=self._plain_options(),
            rendezvous=self._rendezvous(),
            path=sys.path,
        )

    def _plain_options(self) -> RpcBackendOptions:
        """Returns the caller's options without what is between the workers only; a new object."""
        from weft.rpc import RpcBackendOptions

        options = RpcBackendOptions() if self._options is None else copy.copy(self._options)
        options.init_method = options.store = None
        # Whoever knows the token, which is in a private directory, is of this user. A secret
        # does not travel to other processes, and nobody comes from another machine.
        options.secret, options.listen = None, "127.0.0.1"
        return options

    def _rendezvous(self) -> str:
        return os.path.join(self._directory, "rendezvous")

    def _join(self) -> None:
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from weft import rpc
        from weft.launch.cluster_store import ClusterStore

        world_size = len(self.names) + 1
        options = self._plain_options()
        file_store = FileStore(self._rendezvous(), world_size)
        options.store = self._store = ClusterStore(file_store, self._failure)
        rpc.init_rpc(self.name, rank=0, world_size=world_size, rpc_backend_options=options)

    def _follow(self) -> None:
        supervisor = self._supervisor
        assert supervisor is not None
        try:
            self._follow_workers(supervisor)
        except LaunchError as error:
            self._lost_nursery = error
            self._has_failed.set()
            if not self._is_closing:
                self._console.announce(f"weft: {error}")

    def _follow_workers(self, supervisor: Supervisor) -> None:
        while not supervisor.is_done:
            supervisor.poll()

    def _worker_started(self, name: str, pid: int) -> None:
        """Takes note that a worker process has begun."""

    def _worker_ended(self, ended: WorkerExit) -> None:
        self._ended.add(ended.name)
        if self._is_stopping or (self._is_closing and ended.exit_code == 0):
            return
        self._failed.append(ended)
        self._has_failed.set()
        assert self._supervisor is not None
        # Those that end after the first do so because of it, as a rule: say it in one line.
        is_first = len(self._failed) == 1
        tail = self._supervisor.tail(ended.name)
        self._console.announce(
            f"weft: {failure_report(ended, tail) if is_first else describe_death(ended)}"
        )

    def _failure(self) -> LaunchError | None:
        """Returns what went wrong with the workers, where something did."""
        if self._lost_nursery is not None or not self._failed:
            return self._lost_nursery
        first = self._failed[0]
        return LaunchError(describe_worker(first), worker=first.name, exit_code=first.exit_code)

    def _await_workers(self, limit_s: float) -> None:
        if self._follower is not None:
            self._follower.join(limit_s)

    def _clean_up(self) -> None:
        atexit.unregister(self.abandon)
        if self._nursery is not None:
            self._nursery.end()
        if self._follower is not None:
            self._follower.join()
        if self._nursery is not None:
            self._nursery.close()
        if self._supervisor is not None:
            self._supervisor.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._supervisor = self._follower = self._nursery = self._store = None
        self._directory = ""


def _is_there(name: str) -> bool:
    from weft.agent import current

    present = current.current().members.present()
    return any(peer.name == name and peer.lost is None for peer in present)


def _leave_group() -> None:
    from weft import rpc

    with contextlib.suppress(Exception):  # the reason for leaving is told, not what follows from it
        rpc.shutdown(graceful=False)


def _check_unset() -> None:
    # Not imported here: the caller loads torch while the workers do, and not before.
    current = sys.modules.get("weft.agent.current")
    if current is not None:
        current.check_unset()
