"""A cluster that restarts workers that die.

The caller cannot be restarted, so the whole group cannot be either. The group is therefore open:
each worker comes back by itself, under its name and rank. All workers meet at a file in the
cluster's folder. Workers of other hosts meet at a TCP store of this process, see
``torchweft.launch.hosts_launcher``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from torchweft.errors import LaunchError, WeftError
from torchweft.launch.job import serve_open_job
from torchweft.launch.leave_watch import LeaveWatch
from torchweft.launch.local_cluster import Cluster
from torchweft.launch.report import Repeats, RunReport, describe_worker
from torchweft.launch.restarts import WORKER, RestartPlan, RestartPolicy
from torchweft.launch.supervisor import Supervisor
from torchweft.launch.terms import Terms
from torchweft.launch.worker import WorkerExit

if TYPE_CHECKING:
    from torchweft.rpc import RpcBackendOptions

LOOK_S = 0.1
"""Seconds between checks whether the cluster is closed, in the thread that follows the workers."""


class RestartingCluster(Cluster):
    """The cluster that ``torchweft.cluster`` makes if it is given ``restarts``.

    Raises:
        ConfigurationError: The number of restarts is invalid.
    """

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._policy = RestartPolicy(terms.restarts, WORKER)
        self._policy.check()
        self._report = RunReport(self._console, self._policy, self.names, "weft", has_status=False)
        self._plan = RestartPlan(self._policy, self.names, 0.0)
        self._repeats = Repeats(is_of_group=False)
        self._is_bug = False
        self._has_left = False

    def abandon(self) -> None:
        """Ends the workers at once, even while they serve calls; the caller leaves the group."""
        self._has_left = True
        super().abandon()

    def _start_workers(self) -> None:
        self._plan = RestartPlan(self._policy, self.names, time.monotonic())
        self._repeats = Repeats(is_of_group=False)
        self._has_left = False
        super()._start_workers()

    def _init_method(self) -> str:
        return f"file://{self._rendezvous()}"

    def _job(self, name: str, rank: int) -> dict[str, object]:
        return serve_open_job(
            name, rank, options=self._plain_options(), init_method=self._init_method()
        )

    def _join(self) -> None:
        from torchweft.rpc.joining import join_group

        options = self._joining_options()
        deadline_s = time.monotonic() + options.init_timeout
        join_group(self.name, 0, None, options)
        self._has_joined = True  # from here on there is a group to leave
        for name in self.names:
            self.wait_for(name, max(deadline_s - time.monotonic(), 0.0))

    def _joining_options(self) -> RpcBackendOptions:
        """Returns the options with which the caller joins."""
        options = self._plain_options()
        options.check()
        options.init_method = self._init_method()
        return options

    def _follow_workers(self, supervisor: Supervisor) -> None:
        while not (self._has_left and supervisor.is_done):
            if self._is_closing:
                self._plan.cancel()
            if self._plan.is_waiting and not supervisor.can_start():
                supervisor.poll(LOOK_S)  # a lost host is being replaced
                continue
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
        is_hopeless = os.path.exists(self._report_of(ended.name))
        assert self._supervisor is not None
        is_repeated = self._repeats.is_repeated(ended, self._supervisor.tail(ended.name))
        is_over = self._is_bug = is_hopeless or is_repeated
        attempt = None if is_over else self._plan.died(ended.name, time.monotonic())
        if not is_hopeless:
            self._report.died(ended, attempt, is_repeated=is_repeated)
        if attempt is None:
            self._failed.append(ended)
            self._has_failed.set()
            if not is_hopeless:
                self._report.say(self._supervisor.failure_report(ended))

    def _leave_gracefully(self) -> WeftError | None:
        """Leaves the group, then has each worker leave when done; returns the error, if any."""
        self._is_closing = True
        watch = LeaveWatch(self._say, self._terms.leave_timeout_s)
        problem: WeftError | None = self._leave_group(watch)
        self._has_left = True
        if problem is None:
            assert self._supervisor is not None
            self._supervisor.stop([(signal.SIGTERM, watch.left_s())])
            self._await_ends(watch)
            problem = self._unended(watch)
        return self._worst(problem, watch)

    def _failure(self) -> LaunchError | None:
        failure = super()._failure()
        if failure is None or not self._failed or self._lost_nursery is not None:
            return failure
        if failure.__cause__ is not None:
            return failure  # of a setup, which is not retried
        last = self._failed[0]
        reason = "it failed twice at once" if self._is_bug else "its restarts are used up"
        return LaunchError(
            f"{describe_worker(last)}, and is not started again: {reason}",
            worker=last.name,
            exit_code=last.exit_code,
        )
