"""A cluster whose workers are started again when they die.

The caller cannot be started again, so neither can the whole group: it is an open one, in which
each worker comes back by itself, under its name and rank. All meet at a store in this process,
which the thread that follows the workers serves.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

from weft.errors import LaunchError, ShutdownError, WeftError
from weft.launch.job import serve_open_job
from weft.launch.local_cluster import LEAVE_LIMIT_S, Cluster
from weft.launch.nursery import Nursery
from weft.launch.report import describe_worker, failure_report
from weft.launch.restart_plan import RestartPlan
from weft.launch.restarts import WORKER, RestartPolicy
from weft.launch.run_report import RunReport
from weft.launch.store_server import StoreServer
from weft.launch.supervisor import Supervisor
from weft.launch.worker import WorkerExit

if TYPE_CHECKING:
    from weft.rpc import RpcBackendOptions

LOOK_S = 0.1
"""How often the thread that follows the workers looks whether the cluster is closed."""


class RestartingCluster(Cluster):
    """What ``weft.cluster`` makes where it is told of restarts.

    Raises:
        ConfigurationError: There cannot be so many restarts.
    """

    def __init__(
        self,
        names: list[str],
        name: str,
        options: RpcBackendOptions | None,
        nursery: Nursery | None,
        check: bool,
        restarts: int,
    ) -> None:
        super().__init__(names, name, options, nursery, check)
        self._policy = RestartPolicy(restarts, WORKER)
        self._policy.check()
        self._report = RunReport(self._console, self._policy, names, "weft", has_status=False)
        self._server: StoreServer | None = None
        self._plan = RestartPlan(self._policy, names, 0.0)
        self._has_left = False

    def abandon(self) -> None:
        """Ends the workers at once, whatever they do; the caller leaves the group."""
        self._has_left = True
        super().abandon()

    def _start_workers(self) -> None:
        self._server = StoreServer()
        self._plan = RestartPlan(self._policy, self.names, time.monotonic())
        self._has_left = False
        super()._start_workers()

    def _job(self, name: str, rank: int) -> dict[str, object]:
        assert self._server is not None
        return serve_open_job(
            name,
            rank,
            options=self._plain_options(),
            init_method=self._server.init_method,
            path=sys.path,
        )

    def _join(self) -> None:
        from weft.rpc.joining import join_group

        assert self._server is not None
        options = self._plain_options()
        options.check()
        options.init_method = self._server.init_method
        deadline_s = time.monotonic() + options.init_timeout
        join_group(self.name, 0, None, options)
        self._has_joined = True  # from here on there is a group to leave
        for name in self.names:
            self.wait_for(name, max(deadline_s - time.monotonic(), 0.0))

    def _follow_workers(self, supervisor: Supervisor) -> None:
        assert self._server is not None
        # Served for as long as anybody may still use it: the caller does when it leaves.
        supervisor.watch(self._server.fileno(), self._server.serve)
        while not (self._has_left and supervisor.is_done):
            if self._is_closing:
                self._plan.cancel()
            now_s = time.monotonic()
            for name in self._plan.take_due(now_s):
                self._ended.discard(name)
                supervisor.start_again(self._spec(name, self._plan.count(name)))
            wait_s = self._plan.wait_s(now_s)
            supervisor.poll(LOOK_S if wait_s is None else min(wait_s, LOOK_S))

    def _worker_started(self, name: str, pid: int) -> None:
        self._report.started(name, pid)

    def _worker_ended(self, ended: WorkerExit) -> None:
        self._ended.add(ended.name)
        is_expected = ended.exit_code in (0, -signal.SIGTERM)
        if self._is_stopping or (self._is_closing and is_expected):
            return
        attempt = self._plan.died(ended.name, time.monotonic())
        self._report.died(ended, attempt)
        if attempt is None:
            self._failed.append(ended)
            self._has_failed.set()
            assert self._supervisor is not None
            self._report.say(failure_report(ended, self._supervisor.tail(ended.name)))

    def _leave_gracefully(self) -> WeftError | None:
        """Leaves the group, then has each worker leave it when it is done; returns what failed."""
        from weft import rpc

        self._is_closing = True
        problem: ShutdownError | None = None
        try:
            rpc.shutdown()
        except ShutdownError as error:
            problem = error
        self._has_left = True
        assert self._supervisor is not None
        self._supervisor.stop([(signal.SIGTERM, LEAVE_LIMIT_S), (signal.SIGKILL, 0.5)])
        self._await_workers(LEAVE_LIMIT_S + 1.0)
        return problem or self._failure()

    def _failure(self) -> LaunchError | None:
        failure = super()._failure()
        if failure is None or not self._failed or self._lost_nursery is not None:
            return failure
        last = self._failed[0]
        return LaunchError(
            f"{describe_worker(last)}, and is not started again: its restarts are used up",
            worker=last.name,
            exit_code=last.exit_code,
        )

    def _clean_up(self) -> None:
        super()._clean_up()
        if self._server is not None:
            self._server.close()
            self._server = None
