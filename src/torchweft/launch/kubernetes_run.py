"""A JobSet from its creation to its end: followed by its pods' logs, reported and deleted."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable

from torchweft.errors import LaunchError
from torchweft.launch.console import Console, Label
from torchweft.launch.kubernetes_api import Api, Gone, Unreachable
from torchweft.launch.kubernetes_log import PodLog
from torchweft.launch.kubernetes_manifest import GROUP_LABEL, INDEX_LABEL, Object, job_set
from torchweft.launch.kubernetes_pods import Pods
from torchweft.launch.kubernetes_status import Failure, end_of, failure_of, state_of, troubles
from torchweft.launch.report import signal_name
from torchweft.launch.run import output_closed
from torchweft.launch.signals import watched_signals

POLL_S = 1.0
"""Seconds between questions about the JobSet and its pods."""
LOST_S = 120.0
"""Time for which the API server may be silent before a run is given up."""
LAST_LINES_S = 10.0
"""Time for the rest of the logs when the JobSet has ended."""
END_S = 45.0
"""Time for pods to end when they are deleted; Kubernetes kills them after 30 s."""

_HOPELESS = frozenset(("InvalidImageName", "ErrImageNeverPull"))
"""Reasons of a waiting container that no time helps against."""


class JobSetRun:
    """One run.

    Args:
        api: The cluster.
        console: Where the workers' output goes, and messages about them.
        pods: The workers.
        start_timeout_s: Time for all pods to start.
    """

    def __init__(self, api: Api, console: Console, pods: Pods, start_timeout_s: float) -> None:
        self._api = api
        self._console = console
        self._pods = pods
        self._start_timeout_s = start_timeout_s
        self._logs: dict[str, PodLog] = {}
        self._told: set[str] = set()
        self._failures: dict[str, Failure] = {}
        self._restarts = 0
        self._waits_since_s = self._answered_s = time.monotonic()
        self._width = len(max(map(self._name, range(pods.workers)), key=len))
        self._signals: list[int] = []

    def to_the_end(self, on_created: Callable[[Object], None]) -> int:
        """Creates the JobSet, follows and deletes it; returns the exit status as shells do.

        Call it from the main thread: it handles signals while it runs.

        Args:
            on_created: Called with the JobSet, for objects that belong to it.

        Raises:
            LaunchError: The cluster refuses, does not start the pods, or is lost.
        """
        name, namespace = self._pods.name, self._api.namespace
        with selectors.DefaultSelector() as selector:

            def watch(descriptor: int, callback: object) -> None:
                selector.register(descriptor, selectors.EVENT_READ, callback)

            with watched_signals(watch, self._signals.append):
                owner = self._create()
                try:
                    on_created(owner)
                    self._say(f"created JobSet {name!r} in namespace {namespace!r}")
                    return self._follow(selector)
                except BrokenPipeError:
                    return output_closed()
                finally:
                    self._clean_up(selector)

    def _create(self) -> Object:
        try:
            return self._api.create_job_set(job_set(self._pods))
        except Unreachable as error:  # It may be there. One of another run may have its name.
            command = f"kubectl delete jobset {self._pods.name} --namespace {self._api.namespace}"
            raise Unreachable(f"{error}; in case the JobSet was created: {command}") from None

    # Following

    def _follow(self, selector: selectors.BaseSelector) -> int:
        self._waits_since_s = self._answered_s = time.monotonic()
        while not self._signals:
            try:
                ended = self._look()
                self._answered_s = time.monotonic()
            except Unreachable as error:
                ended = None
                self._say_once(f"{error}; trying again")
                if time.monotonic() - self._answered_s > LOST_S:
                    raise
            if ended is not None:
                return self._report(ended)
            _wait(selector, POLL_S)
        number = self._signals[0]
        self._say(f"{signal_name(number)}, deleting JobSet {self._pods.name!r}")
        return 128 + number

    def _look(self) -> str | None:
        """Looks at the JobSet and its pods; returns the JobSet's end, or None if it goes on."""
        try:
            job = self._api.job_set(self._pods.name)
        except Gone:
            raise LaunchError(
                f"JobSet {self._pods.name!r} was deleted by another program or user"
            ) from None
        status, pods = job.get("status", {}), self._api.pods(self._pods.name)
        if job["spec"].get("suspend"):
            self._say_once(f"JobSet {self._pods.name!r} is suspended, as in a queue")
            self._waits_since_s = time.monotonic()
        if status.get("restarts", 0) > self._restarts:
            self._restarts = status["restarts"]
            self._waits_since_s = time.monotonic()
            self._tell_failures()
            self._failures.clear()
            self._say(f"the group starts again, {self._restarts} of {self._pods.restarts}")
        for pod in pods:
            self._look_at(pod)
        for log in self._logs.values():
            if log.failure is not None:
                raise log.failure
        ended = end_of(status)
        if ended is None:
            self._check_start(pods)
        return ended

    def _look_at(self, pod: Object) -> None:
        meta, status = pod["metadata"], pod.get("status", {})
        key, worker = meta.get("uid", meta["name"]), self._worker(pod)
        state = state_of(status)
        if ("running" in state or "terminated" in state) and key not in self._logs:
            label = Label(worker, self._index(worker), self._width)
            self._logs[key] = PodLog(self._api, self._console, label, meta["name"])
        if "terminated" in state or ("deletionTimestamp" in meta and key in self._logs):
            self._logs[key].end()
        failure = failure_of(worker, pod, state)
        if failure is not None:
            self._failures.setdefault(key, failure)
        for reason, text in troubles(status):
            self._say_once(f"worker {worker!r} (pod {meta['name']}) waits: {text}")
            if reason in _HOPELESS:
                raise LaunchError(f"worker {worker!r} cannot start: {text}", worker=worker)

    def _check_start(self, pods: list[Object]) -> None:
        started = sum(bool(state_of(pod.get("status", {})).keys() - {"waiting"}) for pod in pods)
        if started >= self._pods.workers:
            self._waits_since_s = time.monotonic()
            return
        if time.monotonic() - self._waits_since_s <= self._start_timeout_s:
            return
        missing = self._pods.workers - started
        raise LaunchError(
            f"{missing} of {self._pods.workers} workers have not started within "
            f"{self._start_timeout_s:g} s: {'; '.join(self._reasons(pods)) or 'no reason is known'}"
        )

    def _reasons(self, pods: list[Object]) -> list[str]:
        """Returns why workers have not started, by their pods and the cluster's events."""
        found = [
            f"worker {self._worker(pod)!r}: {text}"
            for pod in pods
            for _, text in troubles(pod.get("status", {}))
        ]
        with contextlib.suppress(LaunchError):  # a role may not allow events
            for event in self._api.warnings(self._pods.name):
                about = event["involvedObject"]
                subject = f"{about.get('kind', 'object')} {about['name']}"
                found.append(f"{subject}: {event.get('message', '')} ({event.get('reason', '')})")
        return list(dict.fromkeys(found))

    # The end

    def _report(self, ended: str) -> int:
        limit_s = time.monotonic() + LAST_LINES_S
        for log in self._logs.values():
            log.end()
            log.join(max(0.0, limit_s - time.monotonic()))
        if ended == "Completed":
            return 0
        self._tell_failures()
        if not self._failures:
            self._say(
                f"JobSet {self._pods.name!r} failed, and none of its pods tells why; "
                + ("; ".join(self._reasons([])) or "its events do not tell either")
            )
            return 1
        return self._first_failure().status

    def _tell_failures(self) -> None:
        if self._failures:
            first = self._first_failure()
            self._say(f"worker {first.worker!r} (pod {first.pod}) {first.cause}")

    def _first_failure(self) -> Failure:
        # Workers that have lost another one, or are deleted, fail after it.
        return min(self._failures.values(), key=lambda failure: failure.moment)

    def _clean_up(self, selector: selectors.BaseSelector) -> None:
        """Deletes the JobSet; after a signal, waits for the pods, until the next signal."""
        name, namespace = self._pods.name, self._api.namespace
        try:
            self._api.delete(name)
            limit_s = time.monotonic() + END_S
            while len(self._signals) == 1 and time.monotonic() < limit_s:
                if not self._api.pods(name):
                    break
                _wait(selector, POLL_S)
        except LaunchError as error:
            self._say(f"{error}; delete it: kubectl delete jobset {name} --namespace {namespace}")
        finally:
            for log in self._logs.values():
                log.close()

    # Names and messages

    def _name(self, rank: int) -> str:
        return self._pods.worker_at(f"rank{rank}", rank)

    def _index(self, worker: str) -> int:
        names = map(self._name, range(self._pods.workers))
        return next((rank for rank, name in enumerate(names) if name == worker), 0)

    def _worker(self, pod: Object) -> str:
        meta = pod["metadata"]
        marks = {**meta.get("labels", {}), **meta.get("annotations", {})}
        try:
            return self._pods.worker_at(marks[GROUP_LABEL], int(marks[INDEX_LABEL]))
        except (KeyError, ValueError, IndexError):  # a label that an admission hook has changed
            return str(meta["name"])

    def _say(self, text: str) -> None:
        self._console.announce(f"torchweft run: {text}")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)


def _wait(selector: selectors.BaseSelector, limit_s: float) -> None:
    for event, _ in selector.select(limit_s):
        event.data()
