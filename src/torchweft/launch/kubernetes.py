"""The launcher on Kubernetes: each worker is a pod of a JobSet.

``torchweft run --on kubernetes`` creates the JobSet and a Secret that belongs to it, shows the
pods' output until the JobSet has ended, and deletes it; Kubernetes then deletes the Secret and the
pods. The cluster needs JobSet, and the image torch, Weft and the script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchweft.errors import ConfigurationError, LaunchError, NotSupported
from torchweft.launch import kubernetes_manifest as manifest
from torchweft.launch.console import Console, Label, LineAssembler
from torchweft.launch.kubernetes_manifest import Gone, Object, Pods, Unreachable, refusal
from torchweft.launch.launchers import Launcher
from torchweft.launch.report import signal_name
from torchweft.launch.run import Order, output_closed
from torchweft.launch.signals import watched_signals

if TYPE_CHECKING:
    from torchweft.launch.clusters import Cluster
    from torchweft.launch.terms import Terms

CONNECT_S = 5.0
ANSWER_S = 15.0
POLL_S = 1.0
"""Seconds between questions about the JobSet and its pods."""
LOST_S = 120.0
"""Time for which the API server may be silent before a run is given up."""
LAST_LINES_S = 10.0
"""Time for the rest of the logs when the JobSet has ended."""
END_S = 45.0
"""Time for pods to end when they are deleted; Kubernetes kills them after 30 s."""
LOG_SILENCE_S = 300.0
"""A log that is silent for so long is asked for again: its connection may be dead."""

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECTIONS = 1024
"""Each log has one."""
_AGAIN_S = 1.0
_OVERLAP_S = 5
_CLOSE_S = 2.0
_HOPELESS = frozenset(("InvalidImageName", "ErrImageNeverPull"))
"""Reasons of a waiting container that no time helps against."""


class Kubernetes(Launcher):
    """Starts each worker as a pod.

    Args:
        image: The container image, which has torch, Weft and the script.
        context: The context of the kubeconfig file; by default the current one.
        start_timeout_s: Time for all pods to start, in seconds, after which the run is given up;
            infinite for no limit.
        is_dry: Whether a run only prints the JobSet.
        fields: What else describes the pods, as the options of the command line: ``name`` of the
            run, ``namespace``, ``cpus``, ``gpus``, ``memory``, ``shared_memory``, ``secret``,
            ``tls``, ``user``, ``env`` and ``python``.

    Raises:
        ConfigurationError: A value is invalid.
    """

    has_own_files = True

    def __init__(
        self,
        image: str,
        *,
        context: str = "",
        start_timeout_s: float = 600.0,
        is_dry: bool = False,
        **fields: Any,
    ) -> None:
        self._context = context
        self._start_timeout_s = start_timeout_s
        self._is_dry = is_dry
        self._pods = Pods(image=image, **fields)

    @classmethod
    def add_options(cls, parser: argparse._ArgumentGroup) -> None:
        """Adds the options of ``--on kubernetes``."""
        manifest.add_options(parser)
        add = parser.add_argument
        add("--context", default="", metavar="NAME", help="the context of the kubeconfig file")
        text = "seconds for all pods to start (default: 600)"
        add("--start-timeout", type=float, default=600.0, metavar="S", help=text)
        add("--dry-run", action="store_true", help="print the JobSet, and create nothing")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Kubernetes:
        """Returns the launcher that the command line describes."""
        return cls(
            context=options.context,
            start_timeout_s=options.start_timeout,
            is_dry=options.dry_run,
            **manifest.fields_in(options),
        )

    def run(self, order: Order) -> int:
        """Creates the JobSet and its Secret, and follows it to its end.

        Raises:
            LaunchError: The cluster cannot be reached, refuses, or does not start the pods.
            ConfigurationError: An option does not work here.
        """
        order.check_over_hosts()
        pods = self._pods.with_program(
            order.names,
            order.job,
            restarts=order.restarts.limit,
            master_port=order.master_port,
            metrics=order.metrics,
        )
        if self._is_dry:
            print(manifest.as_yaml(manifest.job_set(pods)), end="")
            return 0
        if pods.metrics is not None:
            order.console.announce(
                f"torchweft run: metrics: port {pods.metrics.port} of each pod, at /metrics"
            )
        with connected(self._context, pods.namespace) as api:
            return JobSetRun(api, order.console, pods, self._start_timeout_s).to_the_end()

    def cluster(self, terms: Terms) -> Cluster:
        """Raises NotSupported: pods could not reach this process."""
        raise NotSupported(
            "a cluster around this program needs workers that can reach it, which pods cannot; "
            "use 'torchweft run --on kubernetes', or start the program in a pod"
        )


# Questions to the API server: bounded, and with errors in words


@contextmanager
def connected(context: str, namespace: str) -> Iterator[Api]:
    """Connects to a cluster, by the service account of this pod or the kubeconfig file.

    Args:
        context: The context of the file; empty for the current one.
        namespace: The namespace of the objects; empty for that of the context.

    Raises:
        ConfigurationError: There is no client, no kubeconfig file, or no such context.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ConfigurationError(
            f"the run needs the client of Kubernetes: pip install 'torchweft[kubernetes]' ({error})"
        ) from None
    settings = client.Configuration()
    loading: Any = config  # without types
    try:
        if _IN_POD.exists() and not context and "KUBECONFIG" not in os.environ:
            loading.load_incluster_config(client_configuration=settings)
            found = (_IN_POD / "namespace").read_text().strip()
        else:
            file = os.environ.get("KUBECONFIG") or None
            loading.load_kube_config(file, context or None, client_configuration=settings)
            contexts, current = loading.list_kube_config_contexts(file)
            chosen = {each["name"]: each for each in contexts}.get(context, current)
            found = chosen["context"].get("namespace", "default")
    except (loading.ConfigException, OSError) as error:
        raise ConfigurationError(
            f"no cluster is configured here: {error}; set KUBECONFIG to the file of the cluster, "
            "or choose a context of it with --context ('kubectl config get-contexts' lists them)"
        ) from None
    settings.retries = False
    settings.connection_pool_maxsize = _CONNECTIONS
    with client.ApiClient(settings) as connection:
        try:
            yield Api(connection, settings.host, namespace or found)
        finally:
            connection.rest_client.pool_manager.clear()


class Api:
    """The objects of one namespace; its methods raise LaunchError if the cluster refuses.

    Args:
        connection: The client's connection.
        host: The address of the API server, for messages.
        namespace: The namespace.
    """

    def __init__(self, connection: Any, host: str, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._host = host
        self._core: Any = client.CoreV1Api(connection)
        self._custom: Any = client.CustomObjectsApi(connection)

    def job_sets(self, verb: str, *arguments: Any, **options: Any) -> Object:
        """Creates, gets or deletes a JobSet; returns it, with its uid.

        Raises:
            Gone: It has been deleted.
        """
        question = getattr(self._custom, f"{verb}_namespaced_custom_object")
        kind = ("jobset.x-k8s.io", "v1alpha2", self.namespace, "jobsets")
        job: Object = self._ask(f"{verb} the JobSet", question, *kind, *arguments, **options)
        return job

    def create_secret(self, body: Object) -> None:
        """Creates a Secret."""
        self._ask("create the Secret", self._core.create_namespaced_secret, self.namespace, body)

    def pods(self, name: str) -> list[Object]:
        """Returns the pods of a JobSet."""
        question, selector = self._core.list_namespaced_pod, f"{manifest.NAME_LABEL}={name}"
        found = self._ask("list the pods", question, self.namespace, label_selector=selector)
        return list(found["items"])

    def warnings(self, name: str) -> list[str]:
        """Returns in words the warnings about objects whose names begin so."""
        question, selector = self._core.list_namespaced_event, "type=Warning"
        found = self._ask("list the events", question, self.namespace, field_selector=selector)
        events = [event for event in found["items"] if event.get("type") == "Warning"]
        return [manifest.event_text(event) for event in events if manifest.is_about(name, event)]

    def log(self, pod: str, since_s: int | None) -> Any:
        """Returns the response whose lines are the log of a worker, with timestamps.

        Args:
            pod: The pod's name.
            since_s: How many seconds back it begins; None for the whole log.
        """
        question = partial(self._core.read_namespaced_pod_log, since_seconds=since_s)
        options = {"container": manifest.CONTAINER, "follow": True, "timestamps": True}
        return self._ask("read a log", question, pod, self.namespace, is_stream=True, **options)

    def _ask(
        self,
        doing: str,
        question: Callable[..., Any],
        *arguments: Any,
        is_stream: bool = False,
        **options: Any,
    ) -> Any:
        """Asks the API server; returns its answer, or a response whose body was not read."""
        import urllib3
        from kubernetes.client import ApiException

        limits_s = (CONNECT_S, LOG_SILENCE_S if is_stream else ANSWER_S)
        try:
            response = question(
                *arguments, **options, _preload_content=False, _request_timeout=limits_s
            )
            # Plain dictionaries: the client's classes refuse what newer clusters add.
            return response if is_stream else json.loads(response.data)
        except ApiException as error:
            raise refusal(doing, error.status, error.body or "", self.namespace) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(
                f"the cluster at {self._host} cannot be reached ({type(error).__name__}); "
                "'kubectl cluster-info' tells whether it is up"
            ) from None
        except ValueError:
            raise Unreachable(f"{self._host} does not answer as a cluster of Kubernetes") from None


class PodLog:
    """Shows the log of a pod, in a thread, until its container has ended or this is closed.

    An API server ends a log that is followed, after hours or because it restarts. Then the log is
    opened again a little earlier, and the lines that were shown are recognised by their timestamps.

    Args:
        api: Where the log is read.
        console: Where it is shown.
        label: The worker's.
        pod: The pod's name.

    Attributes:
        failure: The error because of which nothing more is shown, such as a closed pipe.
    """

    def __init__(self, api: Api, console: Console, label: Label, pod: str) -> None:
        self._api = api
        self._console = console
        self._label = label
        self._pod = pod
        self._lines = LineAssembler()
        self._latest = b""
        self._received_s: float | None = None
        self._has_ended = threading.Event()
        self._is_closed = threading.Event()
        self._response: Any = None
        self.failure: BaseException | None = None
        # A daemon, as nothing interrupts the wait for the head of a response.
        name = f"weft-log-{label.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self, wait_s: float = 0.0) -> None:
        """Tells that the container has ended, and waits until the whole log was shown."""
        self._has_ended.set()
        self._thread.join(wait_s)

    def close(self) -> None:
        """Shows nothing more; ends the thread, or has it end when it is answered."""
        self._is_closed.set()
        response = self._response
        if response is not None:
            with contextlib.suppress(ValueError, OSError):  # it has just ended
                response.shutdown()  # ends a read of the thread
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                was_over = self._has_ended.is_set()
                is_whole = self._show_stream()
                if (was_over and is_whole) or self._is_closed.wait(_AGAIN_S):
                    break
            self._console.write_lines(self._label, self._lines.finish(), is_error=False)
        except OSError as error:
            self.failure = error

    def _show_stream(self) -> bool:
        """Shows the log from where it was left; returns whether it was read to its end."""
        import urllib3

        since_s = None
        if self._received_s is not None:
            since_s = math.ceil(time.monotonic() - self._received_s) + _OVERLAP_S
        try:
            response = self._response = self._api.log(self._pod, since_s)
        except Gone:
            return True
        except LaunchError:  # not yet
            return False
        try:
            for line in () if self._is_closed.is_set() else response:
                self._show_line(line.rstrip(b"\n"))
        except (urllib3.exceptions.HTTPError, ValueError):
            return False  # a lost connection, or closed
        finally:
            self._response = None
            response.close()
        return True

    def _show_line(self, line: bytes) -> None:
        moment, _, text = line.partition(b" ")
        if moment <= self._latest:  # they all have nine digits after the point
            return
        self._latest, self._received_s = moment, time.monotonic()
        self._console.write_lines(self._label, self._lines.feed(text + b"\n"), is_error=False)


# One run


class JobSetRun:
    """A JobSet from its creation to its end: followed by its pods' logs, reported and deleted.

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
        self._failures: dict[str, manifest.Failure] = {}
        self._restarts = 0
        self._waits_since_s = self._answered_s = time.monotonic()
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()

    def to_the_end(self) -> int:
        """Creates the JobSet, follows and deletes it; returns the exit status as shells do.

        Call it from the main thread: it handles signals while it runs.

        Raises:
            LaunchError: The cluster refuses, does not start the pods, or is lost.
        """
        name, namespace = self._pods.name, self._api.namespace

        with self._selector, watched_signals(self._selector, self._signals.append):
            owner = self._create()
            try:
                if not self._pods.secret:
                    self._api.create_secret(
                        manifest.secret_of(self._pods, owner, secrets.token_hex(32))
                    )
                self._say(f"created JobSet {name!r} in namespace {namespace!r}")
                return self._follow()
            except BrokenPipeError:
                return output_closed()
            finally:
                self._clean_up()

    def _create(self) -> Object:
        try:
            return self._api.job_sets("create", manifest.job_set(self._pods))
        except Unreachable as error:  # It may be there. One of another run may have its name.
            command = f"kubectl delete jobset {self._pods.name} --namespace {self._api.namespace}"
            raise Unreachable(f"{error}; in case the JobSet was created: {command}") from None

    def _follow(self) -> int:
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
            self._wait()
        number = self._signals[0]
        self._say(f"{signal_name(number)}, deleting JobSet {self._pods.name!r}")
        return 128 + number

    def _wait(self) -> None:
        for event, _ in self._selector.select(POLL_S):
            event.data()

    def _look(self) -> str | None:
        """Looks at the JobSet and its pods; returns the JobSet's end, or None if it goes on."""
        name = self._pods.name
        try:
            job = self._api.job_sets("get", name)
        except Gone:
            raise LaunchError(f"JobSet {name!r} was deleted by another program or user") from None
        status, pods = job.get("status", {}), self._api.pods(name)
        if job["spec"].get("suspend"):
            self._say_once(f"JobSet {name!r} is suspended, as in a queue")
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
        ended = manifest.end_of(status)
        if ended is None:
            self._check_start(pods)
        return ended

    def _look_at(self, pod: Object) -> None:
        meta, status = pod["metadata"], pod.get("status", {})
        key, worker = meta.get("uid", meta["name"]), self._pods.worker_in(pod)
        state = manifest.state_of(status)
        if ("running" in state or "terminated" in state) and key not in self._logs:
            names = list(self._pods.names)
            index = names.index(worker) if worker in names else 0
            label = Label(worker, index, max(map(len, names)))
            self._logs[key] = PodLog(self._api, self._console, label, meta["name"])
        if "terminated" in state or ("deletionTimestamp" in meta and key in self._logs):
            self._logs[key].end()
        failure = manifest.failure_of(worker, pod, state)
        if failure is not None:
            self._failures.setdefault(key, failure)
        for reason, text in manifest.troubles(status):
            self._say_once(f"worker {worker!r} (pod {meta['name']}) waits: {text}")
            if reason in _HOPELESS:
                raise LaunchError(f"worker {worker!r} cannot start: {text}", worker=worker)

    def _check_start(self, pods: list[Object]) -> None:
        workers = len(self._pods.names)
        started = sum(
            bool(manifest.state_of(pod.get("status", {})).keys() - {"waiting"}) for pod in pods
        )
        if started >= workers:
            self._waits_since_s = time.monotonic()
            return
        if time.monotonic() - self._waits_since_s <= self._start_timeout_s:
            return
        raise LaunchError(
            f"{workers - started} of {workers} workers have not started within "
            f"{self._start_timeout_s:g} s: {'; '.join(self._reasons(pods)) or 'no reason is known'}"
        )

    def _reasons(self, pods: list[Object]) -> list[str]:
        """Returns why workers have not started, by their pods and the cluster's events."""
        found = [
            f"worker {self._pods.worker_in(pod)!r}: {text}"
            for pod in pods
            for _, text in manifest.troubles(pod.get("status", {}))
        ]
        with contextlib.suppress(LaunchError):  # a role may not allow events
            found += self._api.warnings(self._pods.name)
        return list(dict.fromkeys(found))

    def _report(self, ended: str) -> int:
        limit_s = time.monotonic() + LAST_LINES_S
        for log in self._logs.values():
            log.end(max(0.0, limit_s - time.monotonic()))
        if ended == "Completed":
            return 0
        first = self._tell_failures()
        if first is None:
            self._say(
                f"JobSet {self._pods.name!r} failed, and none of its pods tells why; "
                + ("; ".join(self._reasons([])) or "its events do not tell either")
            )
        return 1 if first is None else first.status

    def _tell_failures(self) -> manifest.Failure | None:
        """Tells of the first failure, and returns it: workers that lose another fail after it."""
        first = min(self._failures.values(), key=lambda failure: failure.moment, default=None)
        if first is not None:
            self._say(f"worker {first.worker!r} (pod {first.pod}) {first.cause}")
        return first

    def _clean_up(self) -> None:
        """Deletes the JobSet; after a signal, waits for the pods, until the next signal."""
        name, namespace = self._pods.name, self._api.namespace
        try:
            with contextlib.suppress(Gone):
                self._api.job_sets("delete", name, body={"propagationPolicy": "Foreground"})
            limit_s = time.monotonic() + END_S
            while len(self._signals) == 1 and time.monotonic() < limit_s:
                if not self._api.pods(name):
                    break
                self._wait()
        except LaunchError as error:
            self._say(f"{error}; delete it: kubectl delete jobset {name} --namespace {namespace}")
        finally:
            for log in self._logs.values():
                log.close()

    def _say(self, text: str) -> None:
        self._console.announce(f"torchweft run: {text}")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)
