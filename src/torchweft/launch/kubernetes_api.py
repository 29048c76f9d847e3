"""The questions of a run to the API server of Kubernetes: bounded, and with errors in words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.kubernetes_manifest import (
    CONTAINER,
    JOB_SET_GROUP,
    JOB_SET_VERSION,
    NAME_LABEL,
    Object,
)

CONNECT_S = 5.0
ANSWER_S = 15.0
LOG_SILENCE_S = 300.0
"""A log that is silent for so long is asked for again: its connection may be dead."""

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NEEDED = "the run needs the client of Kubernetes: pip install 'torchweft[kubernetes]'"
_CONNECTIONS = 1024
"""Each log has one."""
_KIND = (JOB_SET_GROUP, JOB_SET_VERSION)


class Unreachable(LaunchError):
    """The API server does not answer; it may later."""


class Gone(LaunchError):
    """There is no such object."""


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
        raise ConfigurationError(f"{_NEEDED} ({error})") from None
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
    """The objects of one namespace.

    Args:
        connection: The client's connection.
        host: The address of the API server, for messages.
        namespace: The namespace.
    """

    def __init__(self, connection: Any, host: str, namespace: str) -> None:
        from kubernetes import client

        self.namespace = namespace
        self._host = host
        self._core = client.CoreV1Api(connection)
        self._custom = client.CustomObjectsApi(connection)

    def create_job_set(self, body: Object) -> Object:
        """Creates a JobSet; returns it with its uid.

        Raises:
            LaunchError: The cluster refuses, does not have JobSet, or has one of this name.
        """
        return self._answer(
            "create the JobSet",
            self._custom.create_namespaced_custom_object,
            *(*_KIND, self.namespace, "jobsets", body),
        )

    def create_secret(self, body: Object) -> None:
        """Creates a Secret.

        Raises:
            LaunchError: The cluster refuses.
        """
        self._answer("create the Secret", self._core.create_namespaced_secret, self.namespace, body)

    def job_set(self, name: str) -> Object:
        """Returns a JobSet.

        Raises:
            Gone: It has been deleted.
            LaunchError: The cluster refuses.
        """
        return self._answer(
            "read the JobSet",
            self._custom.get_namespaced_custom_object,
            *(*_KIND, self.namespace, "jobsets", name),
        )

    def delete(self, name: str) -> None:
        """Deletes a JobSet with all that belongs to it; it may be gone already.

        Raises:
            LaunchError: The cluster refuses.
        """
        try:
            self._answer(
                "delete the JobSet",
                self._custom.delete_namespaced_custom_object,
                *(*_KIND, self.namespace, "jobsets", name),
                body={"propagationPolicy": "Foreground"},
            )
        except Gone:
            pass

    def pods(self, name: str) -> list[Object]:
        """Returns the pods of a JobSet."""
        return self._items(
            "list the pods", self._core.list_namespaced_pod, label_selector=f"{NAME_LABEL}={name}"
        )

    def warnings(self, name: str) -> list[Object]:
        """Returns the events of type ``Warning`` about objects whose names begin so."""
        events = self._items(
            "list the events", self._core.list_namespaced_event, field_selector="type=Warning"
        )
        return [
            event
            for event in events
            if event.get("type") == "Warning"
            and event.get("involvedObject", {}).get("name", "").startswith(name)
        ]

    def log(self, pod: str, since_s: int | None) -> Any:
        """Returns the response whose stream is the log of a worker, with timestamps.

        Args:
            pod: The pod's name.
            since_s: How many seconds back it begins; None for the whole log.
        """
        more = {} if since_s is None else {"since_seconds": since_s}
        return self._ask(
            "read a log",
            self._core.read_namespaced_pod_log,
            *(pod, self.namespace),
            container=CONTAINER,
            follow=True,
            timestamps=True,
            limit_s=LOG_SILENCE_S,
            **more,
        )

    def _items(self, doing: str, question: Callable[..., Any], **options: str) -> list[Object]:
        items: list[Object] = self._answer(doing, question, self.namespace, **options)["items"]
        return items

    def _answer(
        self, doing: str, question: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Object:
        # Plain dictionaries: the client's classes refuse what newer clusters add.
        response = self._ask(doing, question, *arguments, **options)
        with self._in_words(doing):
            data = response.data
        try:
            answer: Object = json.loads(data)
        except ValueError:
            raise Unreachable(f"{self._host} does not answer as a cluster of Kubernetes") from None
        return answer

    def _ask(
        self,
        doing: str,
        question: Callable[..., Any],
        *arguments: Any,
        limit_s: float = ANSWER_S,
        **options: Any,
    ) -> Any:
        """Asks the API server; returns the response, whose body was not read."""
        limits_s = (CONNECT_S, limit_s)
        with self._in_words(doing):
            return question(
                *arguments, **options, _preload_content=False, _request_timeout=limits_s
            )

    @contextmanager
    def _in_words(self, doing: str) -> Iterator[None]:
        import urllib3
        from kubernetes.client import ApiException

        try:
            yield
        except ApiException as error:
            raise _refusal(doing, error.status, error.body or "", self.namespace) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(
                f"the cluster at {self._host} cannot be reached ({type(error).__name__}); "
                "'kubectl cluster-info' tells whether it is up"
            ) from None


def _refusal(doing: str, status: int, body: str | bytes, namespace: str) -> LaunchError:
    """Returns the error for an answer of the API server."""
    said, kind = _said(body)
    if status == 401:
        return LaunchError(f"the cluster does not accept the credentials: {said}; log in again")
    if status == 403:
        return LaunchError(
            f"the cluster does not let this user {doing} in namespace {namespace!r}: {said}; ask "
            "its administrator for a role, or choose another --namespace"
        )
    if status == 404 and kind == "namespaces":
        return LaunchError(f"there is no namespace {namespace!r}; create it, or choose another")
    if status == 404 and doing == "create the JobSet":
        return LaunchError(
            "JobSet is not installed in this cluster: its administrator installs it once, as "
            "https://jobset.sigs.k8s.io/docs/installation/ describes"
        )
    if status == 404:
        return Gone(f"the cluster cannot {doing}: {said}")
    if status == 409:
        return LaunchError(f"there is such an object already: {said}; give another --job-name")
    if status == 429 or status >= 500 or not status:
        return Unreachable(f"the cluster cannot {doing} now ({status}): {said}")
    return LaunchError(f"the cluster refuses to {doing} ({status}): {said}")


def _said(body: str | bytes) -> tuple[str, str]:
    """Returns the message of an answer, and the kind of object that it is about."""
    try:
        answer = json.loads(body)
        return str(answer["message"]), str((answer.get("details") or {}).get("kind", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        return " ".join(text.split())[:200] or "no reason was given", ""
