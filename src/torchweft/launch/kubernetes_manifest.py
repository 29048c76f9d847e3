"""The objects of a run on Kubernetes: a JobSet, whose pods are the workers, and its Secret.

The functions here make these objects from ``jobset.yaml``, which says why they are as they are, and
read what the cluster says of them. Objects are dictionaries: no client is needed, and no cluster.
Whether a name or an amount is valid is for the cluster to say.

Kubernetes expands ``$(NAME)`` in commands and variables, and makes ``$`` of ``$$`` anywhere in
them, so each ``$`` is doubled.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Any, NamedTuple

from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch.job import Job
from torchweft.scraping import VARIABLE, Address

Object = dict[str, Any]

CONTAINER = "node"
"""Name of the workers' containers."""
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
GROUP_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"

_MASTER_PORT = 29500
_TLS_FOLDER = "/etc/weft/tls"
_RESERVED = frozenset(
    (
        "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT JOBSET_NAME WEFT_WORKER_NAME WEFT_RESTART_COUNT "
        "WEFT_SECRET WEFT_SECRET_FILE WEFT_TLS_CERT WEFT_TLS_KEY WEFT_TLS_CA"
    ).split()
)


def _option(metavar: str, text: str, default: Any = "") -> Any:
    """Returns a field that an option of the command line sets, which has the name of the field."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The workers of a run as pods.

    Attributes:
        image: The container image, which has torch, Weft and the script.
        namespace: Its namespace; empty for that of the context.
        cpus: Cores of each worker, as ``2`` or ``500m``; empty for no limit.
        gpus: GPUs of each worker.
        memory: Memory of each worker, as ``8Gi``; empty for no limit.
        shared_memory: Size of ``/dev/shm``.
        secret: Name of the Secret with the secret of the group, under the key ``secret``.
        tls: Name of a Secret with ``tls.crt``, ``tls.key`` and ``ca.crt``; empty for no TLS.
        user: User and group id of the workers, which is not 0.
        python: The interpreter in the image, for the probes.
        name: Name of the run; by default ``weft-`` and a random number.
        env: Further variables.
        command: The program and its arguments.
        names: The workers' names, by rank.
        restarts: How often the group is started again when a worker fails.
        master_port: The port at which the workers meet.
        metrics: Where each worker serves its metrics; None if it does not.

    Raises:
        ConfigurationError: There is no image, or a variable or an address cannot be used.
    """

    image: str = _option("IMAGE", "the container image, with torch, torchweft and the script")
    namespace: str = _option("NAME", "where it is created (default: that of the context)")
    cpus: str = _option("AMOUNT", "cores of each worker, as 4 or 500m (default: no limit)")
    gpus: int = _option("N", "GPUs of each worker (default: 0)", 0)
    memory: str = _option("AMOUNT", "memory of each worker, as 16Gi (default: no limit)")
    shared_memory: str = _option("AMOUNT", "size of /dev/shm (default: 1Gi)", "1Gi")
    secret: str = _option("NAME", "Secret with the secret of the group under the key 'secret'")
    tls: str = _option("NAME", "Secret with tls.crt, tls.key and ca.crt (default: no TLS)")
    user: int = _option("ID", "user and group id of the workers (default: 1000)", 1000)
    python: str = _option("PATH", "the interpreter in the image", "python")
    name: str = field(default_factory=lambda: f"weft-{secrets.token_hex(3)}")
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    names: Sequence[str] = ("worker0",)
    restarts: int = 0
    master_port: int = 0
    metrics: Address | None = None

    def __post_init__(self) -> None:
        if not self.image.strip():
            raise ConfigurationError(
                "there is no image; name one that has torch, torchweft and the script: --image "
                "registry.example/train:1"
            )
        for variable in self.env:
            if variable in _RESERVED:
                raise ConfigurationError(
                    f"environment variable {variable} is set for each pod, or from a Secret; "
                    "leave it out"
                )
        if self.metrics is not None and self.metrics.is_loopback:
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
    for each in _option_fields():
        option = "--" + each.name.replace("_", "-")
        parser.add_argument(option, type=type(each.default), default=each.default, **each.metadata)
    text = "name of the run (default: weft- and a random number)"
    parser.add_argument("--job-name", default="", metavar="NAME", help=text)
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
    given = {each.name: getattr(options, each.name) for each in _option_fields()}
    if options.job_name:
        given["name"] = options.job_name
    given["env"] = {}
    for text in options.env:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigurationError(f"--env is {text!r}; write it as NAME=VALUE")
        given["env"][name] = value
    return given


def _option_fields() -> Iterator[Any]:
    return (each for each in fields(Pods) if each.metadata)


def as_yaml(made: Object) -> str:
    """Returns an object as YAML."""
    plain = json.loads(json.dumps(made))  # in which no part is there twice, for YAML to refer to
    return str(_yaml().safe_dump(plain, sort_keys=False, width=100))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            "runs on Kubernetes need PyYAML; install it by: pip install 'torchweft[kubernetes]'"
        ) from None
    return yaml


def job_set(pods: Pods) -> Object:
    """Returns the JobSet of a run.

    Raises:
        ConfigurationError: PyYAML is not installed.
    """
    text = files(__package__).joinpath("jobset.yaml").read_text()
    job: Object = _yaml().safe_load(text)
    job["metadata"] = _metadata(pods) | {"labels": _labels(pods)}
    job["spec"]["failurePolicy"]["maxRestarts"] = pods.restarts
    (group,) = job["spec"]["replicatedJobs"]
    _fill_template(group["template"]["spec"]["template"], pods)
    rank: Object = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_LABEL}']"}}
    if pods.prefix:
        own = [{"name": "RANK", "valueFrom": rank}]
        own.append(_variable("WEFT_WORKER_NAME", f"{pods.prefix}$(RANK)"))
        groups = [_replicated(group, "worker", len(pods.names), own)]
    else:
        groups = [
            _replicated(
                group,
                f"rank{rank}",
                1,
                [_variable("RANK", str(rank)), _variable("WEFT_WORKER_NAME", name)],
            )
            for rank, name in enumerate(pods.names)
        ]
    job["spec"]["replicatedJobs"] = groups
    return job


def secret_of(pods: Pods, owner: Object, value: str) -> Object:
    """Returns the Secret of a run, which is deleted with the object that owns it."""
    reference = {key: owner[key] for key in ("apiVersion", "kind")}
    reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
    meta = {"name": pods.secret_name, "labels": _labels(pods), "ownerReferences": [reference]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(pods) | meta,
        "type": "Opaque",
        "immutable": True,
        "stringData": {"secret": value},
    }


# Parts


def _metadata(pods: Pods) -> Object:
    return {"name": pods.name} | ({"namespace": pods.namespace} if pods.namespace else {})


def _labels(pods: Pods) -> Object:
    return {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/managed-by": "torchweft"}


def _replicated(group: Object, name: str, count: int, identity: list[Object]) -> Object:
    """Returns a copy of a replicated job for so many workers, whose first variables are given."""
    made: Object = copy.deepcopy(group) | {"name": name}
    spec = made["template"]["spec"]
    spec["parallelism"] = spec["completions"] = count
    container = spec["template"]["spec"]["containers"][0]
    container["env"] = [*identity, *container["env"]]
    return made


def _fill_template(template: Object, pods: Pods) -> None:
    """Fills in the template of all pods."""
    spec = template["spec"]
    spec["securityContext"] |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), pods.user)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    volumes["shm"]["emptyDir"]["sizeLimit"] = pods.shared_memory
    volumes["secret"]["secret"]["secretName"] = pods.secret_name
    (copying,), (worker,) = spec["initContainers"], spec["containers"]
    amounts = {"cpu": pods.cpus, "memory": pods.memory}
    wanted = {name: amount for name, amount in amounts.items() if amount}
    gpus = {"nvidia.com/gpu": str(pods.gpus)} if pods.gpus else {}
    for container, resources in ((copying, wanted), (worker, wanted | gpus)):
        container["image"] = pods.image
        limits = {"requests": resources, "limits": dict(resources)}
        container["resources"] = limits if resources else {}
    copying["command"].insert(0, pods.python)
    for probe in ("readinessProbe", "livenessProbe"):
        worker[probe]["exec"]["command"].insert(0, pods.python)
    worker["command"] = [_literal(part) for part in pods.command]
    worker["env"] += [_variable(name, _literal(text)) for name, text in _variables(pods).items()]
    if pods.tls:
        secret = {"secretName": pods.tls, "defaultMode": 0o440}
        spec["volumes"].append({"name": "tls", "secret": secret})
        mount = {"name": "tls", "mountPath": _TLS_FOLDER, "readOnly": True}
        worker["volumeMounts"].append(mount)
    if pods.metrics is not None:
        worker["ports"] = [{"name": "metrics", "containerPort": pods.metrics.port}]
        # Read by the usual configurations of Prometheus; the operator of Prometheus takes a
        # PodMonitor that names the port.
        annotations = {"scrape": "true", "port": str(pods.metrics.port), "path": "/metrics"}
        marks = {f"prometheus.io/{name}": value for name, value in annotations.items()}
        template["metadata"] = {"annotations": marks}


def _variables(pods: Pods) -> dict[str, str]:
    """Returns the variables that are the same for all workers, beside those of the template."""
    first = "worker" if pods.prefix else "rank0"
    variables = {
        "WORLD_SIZE": str(len(pods.names)),
        "MASTER_ADDR": f"{pods.name}-{first}-0-0.{pods.name}",
        "MASTER_PORT": str(pods.master_port or _MASTER_PORT),
    }
    if pods.tls:
        variables |= {
            "WEFT_TLS_CERT": f"{_TLS_FOLDER}/tls.crt",
            "WEFT_TLS_KEY": f"{_TLS_FOLDER}/tls.key",
            "WEFT_TLS_CA": f"{_TLS_FOLDER}/ca.crt",
        }
    if pods.metrics is not None:
        variables[VARIABLE] = str(pods.metrics)
    with contextlib.suppress(ValueError):  # no limit, or an amount that the cluster refuses
        cores = float(pods.cpus.removesuffix("m")) / (1000 if pods.cpus.endswith("m") else 1)
        # Otherwise as many threads as the node has cores.
        variables["OMP_NUM_THREADS"] = str(max(1, int(cores)))
    return variables | dict(pods.env)


def _variable(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _literal(text: str) -> str:
    return text.replace("$", "$$")


# What the cluster says: refusals, and the states of a JobSet and its pods


class Unreachable(LaunchError):
    """The API server does not answer; it may later."""


class Gone(LaunchError):
    """There is no such object."""


def refusal(doing: str, status: int, body: str | bytes, namespace: str) -> LaunchError:
    """Returns the error for an answer of the API server."""
    try:
        answer = json.loads(body)
        said, kind = str(answer["message"]), str((answer.get("details") or {}).get("kind", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        said, kind = " ".join(text.split())[:200] or "no reason was given", ""
    if status == 404 and kind == "namespaces":
        return LaunchError(f"there is no namespace {namespace!r}; create it, or choose another")
    if status == 404 and doing == "create the JobSet":
        return LaunchError(
            "JobSet is not installed in this cluster: its administrator installs it once, as "
            "https://jobset.sigs.k8s.io/docs/installation/ describes"
        )
    if status == 404:
        return Gone(f"the cluster cannot {doing}: {said}")
    if status == 429 or status >= 500 or not status:
        return Unreachable(f"the cluster cannot {doing} now ({status}): {said}")
    texts = {
        401: f"the cluster does not accept the credentials: {said}; log in again",
        403: f"the cluster does not let this user {doing} in namespace {namespace!r}: {said}; ask "
        "its administrator for a role, or choose another --namespace",
        409: f"there is such an object already: {said}; give another --job-name",
    }
    return LaunchError(texts.get(status, f"the cluster refuses to {doing} ({status}): {said}"))


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


def is_about(name: str, event: Object) -> bool:
    """Whether an event is about an object whose name begins so."""
    return str(event.get("involvedObject", {}).get("name", "")).startswith(name)


def event_text(event: Object) -> str:
    """Returns an event in words."""
    about = event["involvedObject"]
    subject = f"{about.get('kind', 'object')} {about['name']}"
    return f"{subject}: {event.get('message', '')} ({event.get('reason', '')})"
