"""The objects of a run on Kubernetes: a JobSet, whose pods are the workers, and its Secret.

The functions here make these objects, and read what the cluster says of them. Objects are
dictionaries: no client is needed, and no cluster. Decisions that a
reader of the output will wonder about:

- A mounted Secret belongs to root, and users other than root read it through the pod's group. Weft
  refuses a secret that a group can read. So an init container copies it into a file in memory that
  belongs to the worker's user.
- A pod is ready once its worker has joined the group. Its liveness does not depend on that: a
  program may work before it joins and after it has left. A worker that is a member must answer.
- Pods get no links to services. Services called ``weft-...`` would become ``WEFT_...`` variables,
  which workers refuse.
- Kubernetes expands ``$(NAME)`` in commands and variables, and makes ``$`` of ``$$`` anywhere in
  them, so each ``$`` is doubled.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchweft.engine.io.addresses import is_loopback
from torchweft.errors import ConfigurationError
from torchweft.launch.job import Job
from torchweft.scraping import VARIABLE, Address

Object = dict[str, Any]

JOB_SET_GROUP, JOB_SET_VERSION = "jobset.x-k8s.io", "v1alpha2"
CONTAINER = "node"
"""Name of the workers' containers."""
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
GROUP_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SECRET_KEY = "secret"

_RESTARTS = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_INDEX = f"metadata.annotations['{INDEX_LABEL}']"
_MASTER_PORT = 29500
_KEPT_S = 3600
_SECRET_SOURCE = "/etc/weft/secret"
_SECRET_FOLDER = "/run/weft"
_TLS_FOLDER = "/etc/weft/tls"
_COPY = (
    "import os, shutil; os.umask(0o077); "
    f"shutil.copyfile('{_SECRET_SOURCE}/{SECRET_KEY}', '{_SECRET_FOLDER}/{SECRET_KEY}')"
)

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?|")
_CORES = re.compile(r"(?=.*[1-9])\d+(\.\d+)?m?|")
_BYTES = re.compile(r"(?=.*[1-9])\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMES_HINT = "names in Kubernetes have lower-case letters, digits, '-' and '.'"
_BYTES_HINT = "write it like 16Gi or 500M"
_LONGEST_NAME = 40
"""Pods append the replicated job, two numbers and a suffix, and have at most 63 characters."""
_RESERVED = frozenset(
    (
        "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT JOBSET_NAME WEFT_WORKER_NAME WEFT_RESTART_COUNT "
        "WEFT_SECRET WEFT_SECRET_FILE WEFT_TLS_CERT WEFT_TLS_KEY WEFT_TLS_CA"
    ).split()
)


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The workers of a run as pods.

    Attributes:
        image: The container image, which has torch, Weft and the script.
        command: The program and its arguments.
        names: The workers' names, by rank.
        name: Name of the run; by default ``weft-`` and a random number.
        namespace: Its namespace; empty for that of the context.
        cpus: Cores of each worker, as ``2`` or ``500m``; empty for no limit.
        gpus: GPUs of each worker.
        memory: Memory of each worker, as ``8Gi``; empty for no limit.
        shared_memory: Size of ``/dev/shm``.
        secret: Name of the Secret with the secret of the group, under the key ``secret``.
        tls: Name of a Secret with ``tls.crt``, ``tls.key`` and ``ca.crt``; empty for no TLS.
        restarts: How often the group is started again when a worker fails.
        master_port: The port at which the workers meet.
        user: User and group id of the workers.
        python: The interpreter in the image, for the probes.
        env: Further variables.
        metrics: Where each worker serves its metrics; None if it does not.

    Raises:
        ConfigurationError: A value is invalid; says what would be right.
    """

    image: str
    command: Sequence[str] = ()
    names: Sequence[str] = ("worker0",)
    name: str = field(default_factory=lambda: f"weft-{secrets.token_hex(3)}")
    namespace: str = ""
    cpus: str = ""
    gpus: int = 0
    memory: str = ""
    shared_memory: str = "1Gi"
    secret: str = ""
    tls: str = ""
    restarts: int = 0
    master_port: int = 0
    user: int = 1000
    python: str = "python"
    env: Mapping[str, str] = field(default_factory=dict)
    metrics: Address | None = None

    def __post_init__(self) -> None:
        if not self.image.strip():
            raise ConfigurationError(
                "there is no image; name one that has torch, torchweft and the script: --image "
                "registry.example/train:1"
            )
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            raise ConfigurationError(
                f"the name {self.name!r} cannot be used; it has lower-case letters, digits and "
                f"'-', begins with a letter, and has at most {_LONGEST_NAME} characters"
            )
        for what, pattern, hint in (
            ("namespace", _OBJECT_NAME, _NAMES_HINT),
            ("secret", _OBJECT_NAME, _NAMES_HINT),
            ("tls", _OBJECT_NAME, _NAMES_HINT),
            ("cpus", _CORES, "write it like 4, 1.5 or 500m"),
            ("shared_memory", _BYTES, _BYTES_HINT),
        ):
            if not pattern.fullmatch(getattr(self, what)):
                raise ConfigurationError(f"{what} is {getattr(self, what)!r}; {hint}")
        if self.memory and not _BYTES.fullmatch(self.memory):
            raise ConfigurationError(f"memory is {self.memory!r}; {_BYTES_HINT}")
        for what, least in (("gpus", 0), ("restarts", 0), ("master_port", 0), ("user", 1)):
            number = getattr(self, what)
            if number < least:
                raise ConfigurationError(f"{what} is {number}; it must be at least {least}")
        for variable in self.env:
            if not _VARIABLE.fullmatch(variable):
                raise ConfigurationError(f"{variable!r} is no name of an environment variable")
            if variable in _RESERVED:
                raise ConfigurationError(
                    f"environment variable {variable} is set for each pod, or from a Secret; "
                    "leave it out"
                )
        if self.metrics is not None and is_loopback(self.metrics.host):
            raise ConfigurationError(
                f"metrics at {self.metrics} reach nobody outside of the pod; write --metrics "
                f"0.0.0.0:{self.metrics.port} for all addresses of the pod"
            )

    @property
    def secret_name(self) -> str:
        """Name of the Secret with the secret of the group."""
        return self.secret or f"{self.name}-secret"

    @property
    def prefix(self) -> str:
        """The prefix of names that are a prefix and the rank; empty if they are not."""
        prefix = self.names[0].removesuffix("0")
        is_numbered = all(name == f"{prefix}{rank}" for rank, name in enumerate(self.names))
        return prefix if is_numbered else ""

    def with_program(self, names: Sequence[str], job: Job, **more: Any) -> Pods:
        """Returns pods of workers with these names that run the program of a job.

        Raises:
            ConfigurationError: It is not a program; or a value is invalid.
        """
        arguments = job.get("arguments")
        if job["kind"] != "program" or not isinstance(arguments, list):
            raise ConfigurationError(
                "workers on Kubernetes are containers, which are not forked; leave --warm out"
            )
        return replace(self, names=names, command=[self.python, *arguments[1:]], **more)

    def worker_in(self, pod: Object) -> str:
        """Returns the name of the worker in a pod, by its replicated job and completion index."""
        meta = pod["metadata"]
        marks = {**meta.get("labels", {}), **meta.get("annotations", {})}
        try:
            group, index = marks[GROUP_LABEL], int(marks[INDEX_LABEL])
            return self.names[index if self.prefix else int(group.removeprefix("rank"))]
        except (KeyError, ValueError, IndexError):  # a label that an admission hook has changed
            return str(meta["name"])


def add_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options that describe the pods."""
    for option, metavar, default, text in (
        ("--image", "IMAGE", "", "the container image, with torch, torchweft and the script"),
        ("--job-name", "NAME", "", "name of the run (default: weft- and a random number)"),
        ("--namespace", "NAME", "", "where it is created (default: that of the context)"),
        ("--cpus", "AMOUNT", "", "cores of each worker, as 4 or 500m (default: no limit)"),
        ("--gpus", "N", 0, "GPUs of each worker (default: 0)"),
        ("--memory", "AMOUNT", "", "memory of each worker, as 16Gi (default: no limit)"),
        ("--shared-memory", "AMOUNT", "1Gi", "size of /dev/shm (default: 1Gi)"),
        ("--secret", "NAME", "", "Secret with the secret of the group under the key 'secret'"),
        ("--tls", "NAME", "", "Secret with tls.crt, tls.key and ca.crt (default: no TLS)"),
        ("--user", "ID", 1000, "user and group id of the workers (default: 1000)"),
        ("--python", "PATH", "python", "the interpreter in the image"),
    ):
        parser.add_argument(option, type=type(default), default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the workers; may be repeated",
    )


def fields_in(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of ``Pods`` that the options describe.

    Raises:
        ConfigurationError: A variable has no value.
    """
    names = "image namespace cpus gpus memory shared_memory secret tls user python"
    fields: dict[str, Any] = {name: getattr(options, name) for name in names.split()}
    if options.job_name:
        fields["name"] = options.job_name
    fields["env"] = {}
    for text in options.env:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigurationError(f"--env is {text!r}; write it as NAME=VALUE")
        fields["env"][name] = value
    return fields


def as_yaml(made: Object) -> str:
    """Returns an object as YAML.

    Raises:
        ConfigurationError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            "YAML needs PyYAML; install it by: pip install 'torchweft[kubernetes]'"
        ) from None
    plain = json.loads(json.dumps(made))  # in which no part is there twice, for YAML to refer to
    return str(yaml.safe_dump(plain, sort_keys=False, width=100))


def job_set(pods: Pods) -> Object:
    """Returns the JobSet of a run."""
    port = pods.master_port or _MASTER_PORT
    first = "worker" if pods.prefix else "rank0"
    common = [
        _from_field("JOBSET_NAME", f"metadata.labels['{NAME_LABEL}']"),
        _from_field("WEFT_RESTART_COUNT", _RESTARTS),
        _variable("WORLD_SIZE", str(len(pods.names))),
        _variable("MASTER_ADDR", f"{pods.name}-{first}-0-0.{pods.name}"),
        _variable("MASTER_PORT", str(port)),
    ]
    if pods.prefix:
        ranks = [
            _from_field("RANK", _INDEX),
            _variable("WEFT_WORKER_NAME", f"{pods.prefix}$(RANK)"),
        ]
        groups = [_replicated("worker", len(pods.names), _template(pods, [*ranks, *common]))]
    else:
        groups = []
        for rank, name in enumerate(pods.names):
            ranks = [_variable("RANK", str(rank)), _variable("WEFT_WORKER_NAME", name)]
            groups.append(_replicated(f"rank{rank}", 1, _template(pods, [*ranks, *common])))
    return {
        "apiVersion": f"{JOB_SET_GROUP}/{JOB_SET_VERSION}",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": {
            # Workers find each other before they are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": pods.restarts},
            "ttlSecondsAfterFinished": _KEPT_S,
            "replicatedJobs": groups,
        },
    }


def secret_of(pods: Pods, owner: Object, value: str) -> Object:
    """Returns the Secret of a run, which is deleted with the object that owns it."""
    meta = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            **_metadata(pods),
            "name": pods.secret_name,
            "ownerReferences": [reference],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {SECRET_KEY: value},
    }


# Parts


def _metadata(pods: Pods) -> Object:
    labels = {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/managed-by": "torchweft"}
    namespace = {"namespace": pods.namespace} if pods.namespace else {}
    return {"name": pods.name, **namespace, "labels": labels}


def _replicated(name: str, count: int, template: Object) -> Object:
    return {
        "name": name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "parallelism": count,
                "completions": count,
                # A worker does not start again alone: the JobSet starts the group again.
                "backoffLimit": 0,
                "template": template,
            }
        },
    }


def _template(pods: Pods, identity: list[Object]) -> Object:
    template = {"spec": _pod(pods, identity)}
    if pods.metrics is None:
        return template
    # Read by the usual configurations of Prometheus; the operator of Prometheus takes a PodMonitor
    # that names the port.
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(pods.metrics.port),
        "prometheus.io/path": "/metrics",
    }
    return {"metadata": {"annotations": annotations}, **template}


def _pod(pods: Pods, identity: list[Object]) -> Object:
    return {
        "restartPolicy": "Never",
        # Otherwise the worker is process 1, which ignores SIGTERM.
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": pods.user,
            "runAsGroup": pods.user,
            "fsGroup": pods.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": _volumes(pods),
        "initContainers": [_copying(pods)],
        "containers": [_container(pods, identity)],
    }


def _volumes(pods: Pods) -> list[Object]:
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "secret-copy", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {
            "name": "secret",
            "secret": {
                "secretName": pods.secret_name,
                "defaultMode": 0o440,
                "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
            },
        },
    ]
    if pods.tls:
        volumes.append({"name": "tls", "secret": {"secretName": pods.tls, "defaultMode": 0o440}})
    return volumes


def _confined() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _copying(pods: Pods) -> Object:
    return {
        "name": "secret",
        "image": pods.image,
        "command": [pods.python, "-c", _COPY],
        "securityContext": _confined(),
        "resources": _resources(pods, with_gpus=False),
        "volumeMounts": [
            _mount("secret", _SECRET_SOURCE, is_read_only=True),
            _mount("secret-copy", _SECRET_FOLDER),
        ],
    }


def _container(pods: Pods, identity: list[Object]) -> Object:
    mounts = [
        _mount("shm", "/dev/shm"),
        _mount("tmp", "/tmp"),
        _mount("secret-copy", _SECRET_FOLDER, is_read_only=True),
    ]
    if pods.tls:
        mounts.append(_mount("tls", _TLS_FOLDER, is_read_only=True))
    ports = {}
    if pods.metrics is not None:
        ports = {"ports": [{"name": "metrics", "containerPort": pods.metrics.port}]}
    return {
        "name": CONTAINER,
        "image": pods.image,
        "command": [_literal(part) for part in pods.command],
        **ports,
        "env": [*identity, *_surroundings(pods)],
        "resources": _resources(pods),
        "securityContext": _confined(),
        "readinessProbe": _probe(pods, "--joined", period_s=10, failures=3),
        "livenessProbe": _probe(pods, period_s=30, failures=10),
        "volumeMounts": mounts,
    }


def _probe(pods: Pods, *options: str, period_s: int, failures: int) -> Object:
    return {
        "exec": {"command": [pods.python, "-m", "torchweft", "probe", *options]},
        "periodSeconds": period_s,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


def _resources(pods: Pods, *, with_gpus: bool = True) -> Object:
    amounts = {"cpu": pods.cpus, "memory": pods.memory}
    wanted = {name: amount for name, amount in amounts.items() if amount}
    if pods.gpus and with_gpus:
        wanted["nvidia.com/gpu"] = str(pods.gpus)
    return {"requests": wanted, "limits": dict(wanted)} if wanted else {}


def _surroundings(pods: Pods) -> list[Object]:
    """Returns the variables that are the same for all workers."""
    variables = {
        "WEFT_SECRET_FILE": f"{_SECRET_FOLDER}/{SECRET_KEY}",
        # Nodes may have to be made, and the image to be loaded.
        "WEFT_INIT_TIMEOUT_S": "600",
        "PYTHONUNBUFFERED": "1",
        # The user may be unknown in the image, and the root file system cannot be written.
        "HOME": "/tmp",
        "USER": "weft",
    }
    if pods.tls:
        variables |= {
            "WEFT_TLS_CERT": f"{_TLS_FOLDER}/tls.crt",
            "WEFT_TLS_KEY": f"{_TLS_FOLDER}/tls.key",
            "WEFT_TLS_CA": f"{_TLS_FOLDER}/ca.crt",
        }
    if pods.metrics is not None:
        variables[VARIABLE] = str(pods.metrics)
    if pods.cpus:
        # Otherwise as many threads as the node has cores.
        cores = float(pods.cpus[:-1]) / 1000 if pods.cpus.endswith("m") else float(pods.cpus)
        variables["OMP_NUM_THREADS"] = str(max(1, math.floor(cores)))
    variables |= pods.env
    return [_variable(name, _literal(value)) for name, value in variables.items()]


def _variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _literal(text: str) -> str:
    return text.replace("$", "$$")


def _mount(name: str, path: str, *, is_read_only: bool = False) -> Object:
    mount: Object = {"name": name, "mountPath": path}
    return mount | {"readOnly": True} if is_read_only else mount


# What the cluster says of a JobSet and its pods

_USUAL = frozenset(("ContainerCreating", "PodInitializing", ""))
_LAST = "~"
"""Sorts after all moments."""


class Failure(NamedTuple):
    """The end of a worker's container that failed.

    Attributes:
        moment: When it ended, as the cluster writes it.
        worker: The worker's name.
        pod: Its pod.
        status: Its exit status.
        cause: The reason that the cluster gives, in words.
    """

    moment: str
    worker: str
    pod: str
    status: int
    cause: str


def end_of(status: Object) -> str | None:
    """Returns ``Completed`` or ``Failed`` for a JobSet's status; None if it goes on."""
    for condition in status.get("conditions", []):
        if condition.get("type") in ("Completed", "Failed") and condition.get("status") == "True":
            return str(condition["type"])
    return None


def state_of(status: Object) -> Object:
    """Returns the state of a pod's worker; empty if its container does not exist yet."""
    for container in status.get("containerStatuses") or []:
        if container["name"] == CONTAINER:
            state: Object = container.get("state") or {}
            return state
    return {}


def failure_of(worker: str, pod: Object, state: Object) -> Failure | None:
    """Returns how a worker's pod failed; None if it has not."""
    status = pod.get("status", {})
    name = pod["metadata"]["name"]
    ended = state.get("terminated")
    if ended and ended.get("exitCode"):
        code, reason = ended["exitCode"], ended.get("reason", "Error")
        because = "" if reason == "Error" else f" ({reason})"
        moment = ended.get("finishedAt") or _LAST
        return Failure(moment, worker, name, code, f"ended with exit code {code}{because}")
    if status.get("phase") == "Failed" and not ended:
        told = " ".join(filter(None, (status.get("reason"), status.get("message"))))
        return Failure(_LAST, worker, name, 1, f"failed: {told or _first_ended(status)}")
    return None


def _first_ended(status: Object) -> str:
    """Returns how the init container of a pod ended."""
    for container in status.get("initContainerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return (
                f"its init container {container['name']!r} ended with exit code "
                f"{ended['exitCode']}; is torchweft in the image, and the interpreter on its path?"
            )
    return "no reason was given"


def troubles(status: Object) -> Iterator[tuple[str, str]]:
    """Returns why a pod does not start: reasons, and the same in words."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason", "")
            yield reason, f"{condition.get('message', 'it has no node')} ({reason})"
    containers = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason not in _USUAL:
            yield reason, f"{waiting.get('message') or container.get('image', '')} ({reason})"
